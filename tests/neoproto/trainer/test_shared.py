import asyncio

import pytest

from neoproto.store import MemoryStore
from neoproto.trainer.shared import Changes, CountedBatch
from tests.neoproto.trainer.replay import prompts
from tests.virtual_time import run


def test_a_counted_batch_is_released_with_its_last_part(store: MemoryStore) -> None:
    counted = CountedBatch(prompts(3), 3)
    counted.done()
    counted.done()
    assert len(store.keys()) == 2
    assert counted.batch["prompts"].tolist() == [[0], [1], [2]]
    counted.done()
    assert counted.parts_left == 0
    assert len(store.keys()) == 0
    with pytest.raises(ValueError, match="1 parts of a batch are done with, 0 are left"):
        counted.done()


@pytest.mark.parametrize("parts", [0, -1])
def test_a_batch_has_parts(parts: int) -> None:
    with pytest.raises(ValueError, match="at least one part"):
        CountedBatch(prompts(1), parts)
    with pytest.raises(ValueError, match="parts of a batch"):
        CountedBatch(prompts(1), 1).done(parts)


def test_a_change_wakes_everybody_who_waits_and_nobody_later() -> None:
    async def scenario() -> None:
        changes = Changes()
        waits = [asyncio.create_task(changes.wait(60)) for _ in range(2)]
        await asyncio.sleep(0)
        changes.notify()
        await asyncio.gather(*waits)
        clock = asyncio.get_running_loop().time
        assert clock() == 0.0
        await changes.wait(60)
        assert clock() == 60.0

    run(scenario)


def test_a_held_batch_is_released_when_it_is_let_go(store: MemoryStore) -> None:
    batch = CountedBatch(prompts(2), 2)
    batch.hold()
    batch.done(2)
    assert batch.parts_left == 1
    assert store.keys() != []
    batch.done()
    assert store.keys() == []
    with pytest.raises(ValueError, match="released"):
        batch.hold()


def test_batches_whose_last_parts_are_done_are_released_together(store: MemoryStore) -> None:
    first, second = CountedBatch(prompts(2), 2), CountedBatch(prompts(1), 2)
    CountedBatch.all_done([first, second, first])
    assert (first.parts_left, second.parts_left) == (0, 1)
    assert sorted(store.keys()) == sorted(ref.key for ref in second.batch.refs)
    with pytest.raises(ValueError, match="1 parts of a batch are done with, 0 are left"):
        CountedBatch.all_done([second, first])


def test_rows_come_without_meta_info_and_own_nothing(store: MemoryStore) -> None:
    batch = prompts(3)
    batch.meta_info["step"] = 1
    counted = CountedBatch(batch, 1)
    rows = counted.rows([2, 0])
    assert rows["prompts"].tolist() == [[2], [0]]
    assert rows.meta_info == {}
    assert counted.rows([1, 2])["prompts"].tolist() == [[1], [2]]
    assert counted.whole.meta_info == {}
    assert counted.batch.meta_info == {"step": 1}
