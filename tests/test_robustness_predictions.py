"""Tests of fastmoll.robustness.predictions."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import CONTEXT

from fastmoll.distributed import Process
from fastmoll.robustness.predictions import (
    Predictions,
    Recorder,
    check_parquet,
    gather_predictions,
    has_predictions,
    read_predictions,
    write_predictions,
)

parquet = pytest.importorskip("pyarrow.parquet")


def some(ids: list[int], classes: int = 3) -> Predictions:
    generator = torch.Generator().manual_seed(sum(ids))
    index = torch.tensor(ids, dtype=torch.int64)
    return Predictions(index, index % classes, torch.randn(len(ids), classes, generator=generator))


def test_predictions_of_all_ranks_come_back_in_the_order_of_the_samples(tmp_path: Path) -> None:
    first, second = some([5, 1, 3]), some([4, 0, 2])
    write_predictions(tmp_path / "p.parquet", [first, None, second], "this", "fog-1")
    (found,) = read_predictions(tmp_path / "p.parquet", "this")
    assert found.ids.tolist() == [0, 1, 2, 3, 4, 5] and found.labels.tolist() == [0, 1, 2, 0, 1, 2]
    whole = torch.cat([first.logits, second.logits])
    assert torch.equal(found.logits, whole[torch.tensor([4, 1, 5, 2, 3, 0])])
    assert os.listdir(tmp_path) == ["p.parquet"]


def gathering_main(rank: int, place: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    part = some([[5, 1], [0]][rank])
    found = gather_predictions(Process(rank, 2, torch.device("cpu")), part)
    if rank == 0:
        assert [x and x.ids.tolist() for x in found] == [[5, 1], [0]]
    else:
        assert found == []
    torch.distributed.destroy_process_group()


def test_rank_0_alone_gets_the_predictions_of_all(tmp_path: Path) -> None:
    ranks: list[Any] = [CONTEXT.Process(target=gathering_main, args=(rank, str(tmp_path / "s"))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=60)
    assert [process.exitcode for process in ranks] == [0, 0]
    part = some([1])
    assert gather_predictions(Process(0, 1, torch.device("cpu")), part) == [part]


def test_other_tools_read_columns_that_explain_themselves(tmp_path: Path) -> None:
    write_predictions(tmp_path / "p.parquet", [some([0, 1])], "this", "fog-1")
    table = parquet.read_table(tmp_path / "p.parquet")
    assert {name: str(table.schema.field(name).type) for name in table.column_names} == {
        "index": "int64",
        "label": "int64",
        "logits": "fixed_size_list<element: float>[3]",
    }
    np.testing.assert_array_equal(np.stack(table["logits"].to_numpy()), some([0, 1]).logits.numpy())


def test_a_large_set_comes_in_portions(tmp_path: Path) -> None:
    write_predictions(tmp_path / "p.parquet", [some(list(range(10_000)))], "this", "fog-1")
    parts = list(read_predictions(tmp_path / "p.parquet"))
    assert len(parts) > 1 and torch.equal(torch.cat([part.ids for part in parts]), torch.arange(10_000))
    assert torch.equal(torch.cat([part.logits for part in parts]), some(list(range(10_000))).logits)


def test_a_recorder_keeps_batches_in_float32_and_hands_them_out_once() -> None:
    recorder = Recorder()
    assert recorder.take() is None
    logits = torch.tensor([[1.5, 2.0]], dtype=torch.bfloat16)
    for number in (4, 3):
        recorder(logits * number, torch.tensor([1]), torch.tensor([number], dtype=torch.int32))
    found = recorder.take()
    assert found is not None and found.ids.tolist() == [4, 3]
    assert found.ids.dtype == found.labels.dtype == torch.int64
    assert found.logits.dtype == torch.float32 and found.logits.tolist() == [[6, 8], [4.5, 6]]
    assert recorder.take() is None
    with pytest.raises(ValueError, match="index must be given"):
        recorder(logits, torch.tensor([1]), None)


def test_files_that_do_not_fit_are_named_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    with pytest.raises(ValueError, match=r"there are no predictions .*p\.parquet"):
        read_predictions(path)
    write_predictions(path, [some([0, 1])], "this", "fog-1")
    with pytest.raises(ValueError, match=r"p\.parquet is of another evaluation"):
        read_predictions(path, "that")
    with pytest.raises(ValueError, match=r"p\.parquet has the predictions of fog-1, not of fog-2"):
        read_predictions(path, "this", "fog-2")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"p\.parquet is damaged, or no Parquet file"):
        read_predictions(path)
    import pyarrow

    parquet.write_table(pyarrow.table({"index": [1]}), path)
    with pytest.raises(ValueError, match=r"p\.parquet has no column label, logits"):
        read_predictions(path)


def test_a_file_without_the_name_of_its_cell_is_read_as_any(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    write_predictions(path, [some([0, 1])], "this", "fog-1")
    table = parquet.read_table(path)
    assert table.schema.metadata.pop(b"fastmoll.cell") == b"fog-1"
    parquet.write_table(table.replace_schema_metadata({b"fastmoll.evaluation": b"this"}), path)
    (found,) = read_predictions(path, "this", "fog-2")
    assert found.ids.tolist() == [0, 1]


def test_predictions_are_there_if_whole_and_of_that_cell(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    assert not has_predictions(path, "this", "fog-1", 2, 3)
    write_predictions(path, [some([0, 1])], "this", "fog-1")
    assert has_predictions(path, "this", "fog-1", 2, 3)
    for other in (("that", "fog-1", 2, 3), ("this", "fog-2", 2, 3), ("this", "fog-1", 3, 3), ("this", "fog-1", 2, 4)):
        assert not has_predictions(path, *other)
    path.write_bytes(path.read_bytes()[:-20])
    assert not has_predictions(path, "this", "fog-1", 2, 3)


def test_damage_anywhere_in_a_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    write_predictions(path, [some(list(range(300)))], "this", "fog-1")
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    assert has_predictions(path, "this", "fog-1", 300, 3)
    for place in range(footer // 20, footer, footer // 20):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        parquet.read_metadata(path)  # the footer is whole
        assert not has_predictions(path, "this", "fog-1", 300, 3), place
        with pytest.raises(ValueError, match=r"p\.parquet is damaged: "):
            list(read_predictions(path, "this", "fog-1"))


def test_damage_in_the_footer_is_noticed_or_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    want = some(list(range(40)))
    write_predictions(path, [want], "this", "fog-1")
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    refused = 0
    for place in range(footer, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        if has_predictions(path, "this", "fog-1", 40, 3):
            (found,) = read_predictions(path)
            assert all(map(torch.equal, found, want)), place
        else:
            refused += 1
    assert refused > 100


def test_a_folder_whose_name_is_no_utf8_is_one_like_others(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    write_predictions(folder / "p.parquet", [some([0, 1])], "this", "fog-1")
    (found,) = read_predictions(folder / "p.parquet", "this")
    assert found.ids.tolist() == [0, 1]


def test_ids_that_float64_would_round_come_back(tmp_path: Path) -> None:
    ids = [2**53 + 2, 2**53 + 1, 2**63 - 1]
    write_predictions(tmp_path / "p.parquet", [some(ids)], "this", "fog-1")
    (found,) = read_predictions(tmp_path / "p.parquet")
    assert found.ids.tolist() == sorted(ids)


def test_a_full_disk_leaves_the_old_file_and_one_line(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    path.write_text("old")
    (tmp_path / ".p.parquet.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"^/.*p\.parquet can't be written: No space left on device$"):
        write_predictions(path, [some([0, 1])], "this", "fog-1")
    assert (os.listdir(tmp_path), path.read_text()) == (["p.parquet"], "old")


def test_without_pyarrow_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"^predictions need pyarrow: pip install 'fastmoll\[report\]'"):
        check_parquet()
