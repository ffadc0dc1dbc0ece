"""A settings file that YAML or nobody can make settings of: all that is wrong is said at once, each with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.settings import SettingsError, load_settings

pytestmark = pytest.mark.usefixtures("clean_environment")


def lines(folder: Path, content: str | bytes) -> list[str]:
    """What is said of a settings file, each line without the file's name."""
    file = folder / "settings.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    assert all(line.startswith(f"{file}:") for line in caught.value.lines), caught.value.lines
    return [line.removeprefix(f"{file}:") for line in caught.value.lines]


@pytest.mark.parametrize(
    ("content", "line", "kind"),
    [
        ("- a\n- b\n", 1, "a list"),
        ("# settings\n- [shards, 2]\n", 2, "a list"),
        ("text", 1, "a single value"),
        ("\n\n42", 3, "a single value"),
        ("true", 1, "a single value"),
    ],
)
def test_what_is_no_mapping_is_told_with_its_line(tmp_path: Path, content: str, line: int, kind: str) -> None:
    [told] = lines(tmp_path, content)
    assert told == f"{line}: settings are a mapping, as `warehouse: file:...`, and not {kind}"


@pytest.mark.parametrize("content", ["", "# nothing set\n", "null", "---\n"])
def test_an_empty_file_leaves_the_defaults(tmp_path: Path, content: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    assert load_settings(file).tracker.shards == 2


def test_what_is_there_twice_hides_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = "tracker: {max_num_buckets: 1, max_num_buckets: many}\nrelase: {}\nrelease:\n  lanes: 4\n  lanes: 5\n"
    monkeypatch.setenv("DELAYLAKE_TRAKER__SHARDS", "4")
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    assert [line.removeprefix(f"{file}:").split(": input")[0] for line in caught.value.lines] == [
        "DELAYLAKE_TRAKER__SHARDS: traker.shards = '4': no such setting",
        "1: tracker.max_num_buckets is there twice, first in line 1",
        "1: tracker.max_num_buckets = 'many'",
        "2: relase = {}: no such setting",
        "5: release.lanes is there twice, first in line 4",
    ]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("1: 2\n~: 3\n", ["1: settings: 1 is no name of a setting", "2: settings: ~ is no name of a setting"]),
        ("? [a, b]\n: 3\n", ["1: settings: a list or mapping is no name of a setting"]),
        ("tracker:\n  {{ shards }}: 1\n", ["2: tracker: a list or mapping is no name of a setting"]),
        ("tracker: &x\n- *x\n", ["1: tracker.0 is a part of itself"]),
        ("tracker:\n  shards: 2020-13-45\n", ["2: tracker.shards = '2020-13-45': month must be in 1..12"]),
        ("auth: {token_secret_key: 2020-13-45}\n", ["1: auth.token_secret_key: month must be in 1..12"]),
    ],
)
def test_what_no_settings_can_be_made_of_is_told_with_its_line(tmp_path: Path, content: str, told: list[str]) -> None:
    assert lines(tmp_path, content) == told


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ("tracker: {shards: 1\nroutes: []\n", 2, "expected ',' or '}', but got ':'"),
        ("tracker: 1\n---\nroutes: []\n", 2, "found another document"),
        ("\n\ttracker: 1", 2, "found character '\\t' that cannot start any token"),
        ("tracker: {}\nroutes: *nope\n", 2, "found undefined alias 'nope'"),
        ("tracker: {}\nroutes: !foo []\n", 2, "could not determine a constructor for the tag '!foo'"),
        ("tracker: {}\nrelease: {<<: 3}\n", 2, "expected a mapping or list of mappings for merging"),
        ("tracker: {}\nroutes: \x01\n", 2, "special characters are not allowed"),
        (b"tracker: {}\nroutes: \xff\n", 2, "can't decode byte 0xff"),
    ],
)
def test_what_is_no_yaml_is_told_with_its_line(tmp_path: Path, content: str | bytes, line: int, reason: str) -> None:
    [told] = lines(tmp_path, content)
    assert told.startswith(f"{line}: ")
    assert reason in told


@pytest.mark.slow
def test_what_is_nested_too_deeply_is_told(tmp_path: Path) -> None:
    assert lines(tmp_path, f"tracker: {'[' * 5_000}") == [" nested too deeply"]


def test_what_is_merged_from_elsewhere_is_told_with_the_line_where_it_is(tmp_path: Path) -> None:
    content = "tracker: &mine\n  max_num_buckets: many\nrelease: {<<: *mine, lanes: x}\n"
    assert [told.split(": input")[0] for told in lines(tmp_path, content)] == [
        "2: tracker.max_num_buckets = 'many'",
        "2: release.max_num_buckets = 'many': no such setting",
        "3: release.lanes = 'x'",
    ]


def test_what_is_wrong_is_told_in_the_order_of_the_file(tmp_path: Path) -> None:
    wrong = ["release: {lanes: x}", "relase: {}", "tracker: {max_num_buckets: many}", "release: {}", "api: {port: z}"]
    for content in (wrong, ["", *reversed(wrong)], [*wrong, "routes: 2020-13-45", "1: 2"]):
        told = [int(line.split(":")[0]) for line in lines(tmp_path, "\n".join(["# settings"] * 9 + content))]
        assert told == sorted(told)
        assert len(told) > 1


def test_an_alias_is_looked_at_once(tmp_path: Path) -> None:
    content = "tracker: &a {shards: 1, shards: 2}\nrelease: *a\napi: {<<: *a}\n"
    assert [told for told in lines(tmp_path, content) if "twice" in told] == [
        "1: tracker.shards is there twice, first in line 1"
    ]


def test_a_value_of_very_many_aliases_is_told_shortly(tmp_path: Path) -> None:
    content = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    content += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
    told = lines(tmp_path, content)
    assert len(told) == 10
    assert max(map(len, told)) < 2_000


@pytest.mark.parametrize("name", ["x" * 5_000, ".", "no\0thing"])
def test_what_can_not_be_a_file_is_told(name: str) -> None:
    with pytest.raises(SettingsError, match="no settings file at"):
        load_settings(Path(name))


def test_numbers_of_spark_may_have_a_fraction(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("spark: {conf: {spark.memory.fraction: 0.5, spark.ui.enabled: false, spark.executor.cores: 2}}")
    assert load_settings(file).spark.conf == {
        "spark.memory.fraction": 0.5, "spark.ui.enabled": False, "spark.executor.cores": 2
    }  # fmt: skip
