"""The wire formats are Pulsar's where Pulsar has them, and the generated code is that of the .proto files."""

from __future__ import annotations

import re
from pathlib import Path

import _pulsar
import grpc_tools
import pytest
from grpc_tools import protoc

from tracker.wire.delayed_index_pb2 import CANCEL, DELAY, DelayedIndex
from tracker.wire.message_id_pb2 import MessageIdData

ROOT = Path(__file__).parents[3]

# timestamp (field 1) 300, ledger_id (2) 7, entry_id (3) 1, as varints: what Pulsar's bucket snapshots hold.
PULSARS_DELAYED_INDEX = bytes([0x08, 0xAC, 0x02, 0x10, 0x07, 0x18, 0x01])


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    sources = sorted(path.name for path in (ROOT / "proto").glob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    options = [f"-I{ROOT / 'proto'}", f"-I{well_known}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    assert protoc.main(["protoc", *options, *sources]) == 0
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    folders = ("tracker/wire", "broker/protocol/wire")
    there = {path.name: path.read_text() for folder in folders for path in (ROOT / folder).glob("*_pb2.py*")}
    assert made == there, "run `make proto`"
    clients = {path.name: path.read_text() for path in (ROOT / "clients/python/src/delaylake/wire").glob("*_pb2.py*")}
    check = r"^from google.protobuf import runtime_version.*\n|^_runtime_version\.Validate[^)]*\)\n"
    made["delaylake_pb2.py"] = re.sub(check, "", made["delaylake_pb2.py"], flags=re.M)
    assert clients == {name: made[name] for name in ("delaylake_pb2.py", "delaylake_pb2.pyi")}, "run `make proto`"


def test_a_delayed_index_of_pulsar_is_one_of_ours() -> None:
    index = DelayedIndex.FromString(PULSARS_DELAYED_INDEX)
    assert (index.timestamp, index.ledger_id, index.entry_id) == (300, 7, 1)
    assert index.delayed_operation_type == DELAY


def test_a_delay_of_ours_is_a_delayed_index_of_pulsar() -> None:
    assert DelayedIndex(timestamp=300, ledger_id=7, entry_id=1).SerializeToString() == PULSARS_DELAYED_INDEX


def test_a_cancel_is_a_delayed_index_with_one_more_field() -> None:
    cancel = DelayedIndex(timestamp=300, ledger_id=7, entry_id=1, delayed_operation_type=CANCEL)
    assert cancel.SerializeToString() == PULSARS_DELAYED_INDEX + bytes([0x20, 0x01])


def test_a_delayed_index_without_its_entry_is_parsed_but_not_whole() -> None:
    assert not DelayedIndex.FromString(PULSARS_DELAYED_INDEX[:5]).IsInitialized()


@pytest.mark.parametrize("partition", [-1, 0, 3])
@pytest.mark.parametrize("batch_index", [-1, 0, 2])
def test_a_message_id_is_read_from_what_the_client_serializes(partition: int, batch_index: int) -> None:
    serialized = _pulsar.MessageId(partition, 2**40, 5, batch_index).serialize()
    read = MessageIdData.FromString(serialized)
    assert (read.ledgerId, read.entryId, read.partition, read.batch_index) == (2**40, 5, partition, batch_index)


def test_a_message_id_of_ours_is_read_by_the_client() -> None:
    mine = MessageIdData(ledgerId=12, entryId=5, partition=2, batch_index=1).SerializeToString()
    read = _pulsar.MessageId.deserialize(mine)
    assert (read.ledger_id(), read.entry_id(), read.partition(), read.batch_index()) == (12, 5, 2, 1)
