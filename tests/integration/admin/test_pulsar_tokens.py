"""Keys and tokens from Pulsar's own tool, as its users make them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from admin.security.tokens import TokenError, TokenVerifier
from broker.jvm.jars import jars
from conf.api_settings import AuthSettings
from tests.conftest import RUN_SECONDS


def tokens(*arguments: str) -> str:
    """Runs `pulsar tokens` as Pulsar's script does; what it prints."""
    main = "org.apache.pulsar.utils.auth.tokens.TokensCliUtils"
    command = ["java", "-XX:TieredStopAtLevel=1", "-cp", f"{jars('broker')}/*", main, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=RUN_SECONDS).stdout.strip()


def verifier(**settings: str) -> TokenVerifier:
    return TokenVerifier.from_settings(AuthSettings.model_validate({"enabled": True, **settings}))


def test_a_secret_key_and_its_tokens(tmp_path: Path) -> None:
    file = tmp_path / "secret.key"
    tokens("create-secret-key", "--output", str(file))
    other = tokens("create-secret-key", "--base64", "--signature-algorithm", "HS512")
    token = tokens("create", "--secret-key", f"file://{file}", "--subject", "billing", "--expiry-time", "1h")
    of_other = tokens("create", "--secret-key", f"data:;base64,{other}", "--subject", "billing")
    mine = verifier(token_secret_key=f"file://{file}")
    assert mine.role(token) == "billing"
    assert verifier(token_secret_key=other).role(of_other) == "billing"
    with pytest.raises(TokenError):
        mine.role(of_other)


@pytest.mark.parametrize("algorithm", ["RS512", "ES256"])
def test_a_key_pair_and_its_tokens(tmp_path: Path, algorithm: str) -> None:
    private, public = tmp_path / "private.key", tmp_path / "public.key"
    pair = ("--output-private-key", str(private), "--output-public-key", str(public))
    tokens("create-key-pair", "--signature-algorithm", algorithm, *pair)
    signed = ("--private-key", f"file://{private}", "--signature-algorithm", algorithm, "--subject", "billing")
    check = verifier(token_public_key=f"file://{public}", token_public_alg=algorithm)
    assert check.role(tokens("create", *signed)) == "billing"
