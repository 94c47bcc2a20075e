"""The scheduler by example. The device and the driver are those of mock_device.py; random workloads are in
test_scheduler_properties.py."""

from __future__ import annotations

import numpy as np
import pytest
from mock_device import Job, Settings, Simulation, run_all

from flatbed.scheduling.plan import Sequence, State
from flatbed.scheduling.scheduler import PATIENCE, Scheduler


def prompt(length: int, kind: int = 0) -> list[int]:
    return [(kind * 31 + at * 7) % 251 for at in range(length)]


def drain(simulation: Simulation) -> None:
    while simulation.flight:
        simulation.commit()


# ---- what is in a plan -----------------------------------------------------------------------------------------------


def test_nothing_to_do_is_no_plan() -> None:
    scheduler = Scheduler(4, 4, token_budget=8, max_requests=4)
    assert scheduler.plan() is None
    assert not scheduler.has_work


def test_a_prompt_is_prefilled_in_chunks_of_the_token_budget() -> None:
    simulation = Simulation(Settings(8, 4, token_budget=5))
    simulation.submit(Job(prompt(12), 3))
    chunks = []
    for _ in range(3):
        plan = simulation.step()
        assert plan is not None
        chunks += [(c.start, c.end, c.last) for c in plan.chunks]
    assert chunks == [(0, 5, False), (5, 10, False), (10, 12, True)]
    plan = simulation.step()
    assert plan is not None
    assert (plan.chunks, plan.positions.tolist(), plan.num_tokens) == ([], [12], 1)
    simulation.run()


def test_decodes_come_first_in_a_plan_and_chunks_fill_what_is_left() -> None:
    simulation = Simulation(Settings(16, 4, token_budget=8))
    first = simulation.submit(Job(prompt(4), 9))
    simulation.step()
    second = simulation.submit(Job(prompt(12, 1), 9))
    plan = simulation.step()
    assert plan is not None
    assert plan.sequences == [first]
    assert [(c.sequence, c.start, c.end, c.last) for c in plan.chunks] == [(second, 0, 7, False)]
    assert plan.num_tokens == 8
    assert plan.sampled == [first]
    assert plan.request_ids == ["request 0", "request 1"]
    assert plan.admitted == [second]
    plan = simulation.step()
    assert plan is not None
    assert plan.sampled == [first, second]
    simulation.run()


@pytest.mark.parametrize("prefill_first", [False, True])
def test_a_sequence_does_not_decode_in_the_step_that_prefills_it(prefill_first: bool) -> None:
    """Its first token is sampled by that very step; there is nothing to decode yet."""
    simulation = Simulation(Settings(8, 4, token_budget=64, prefill_first=prefill_first))
    sequence = simulation.submit(Job(prompt(3), 4))
    plan = simulation.step()
    assert plan is not None
    assert (plan.sequences, [c.sequence for c in plan.chunks]) == ([], [sequence])
    simulation.run()


def test_one_new_token_needs_no_decode() -> None:
    simulation, (sequence,) = run_all(Settings(2, 4), [Job(prompt(8), 1)])
    assert simulation.device.computed == 8
    assert sequence.finish_reason == "length"
    assert len(sequence.output) == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_last_token_is_never_computed(depth: int) -> None:
    """A request of P + N tokens has P + N - 1 positions; running ahead does not add any."""
    simulation, (sequence,) = run_all(Settings(3, 4, depth=depth), [Job(prompt(5), 8)])
    assert simulation.device.computed == 12 == sequence.positions
    assert simulation.scheduler.pool.peak_held == 3


def test_a_request_that_fills_the_pool_to_its_last_slot_runs() -> None:
    for depth in (1, 3):
        _, (sequence,) = run_all(Settings(3, 4, depth=depth), [Job(prompt(4), 9)])
        assert sequence.preemptions == 0


def test_any_of_several_eos_tokens_ends_a_sequence_and_is_part_of_its_output() -> None:
    for eos in ([0], [3, 1], [5, 4, 2, 0]):
        jobs = [Job(prompt(4, kind), 40, eos=eos) for kind in range(8)] + [Job(prompt(4, 9), 40)]
        _, sequences = run_all(Settings(128, 4), jobs)
        assert {s.finish_reason for s in sequences[:-1]} == {"eos"}
        assert all(s.output[-1] in eos and not set(s.output[:-1]) & set(eos) for s in sequences[:-1])
        assert sequences[-1].finish_reason == "length"


# ---- sharing ---------------------------------------------------------------------------------------------------------


def test_a_twin_shares_full_blocks_and_copies_the_unfinished_one() -> None:
    simulation = Simulation(Settings(16, 4))
    first, second = (simulation.submit(Job(prompt(7), 6, seed=seed)) for seed in (0, 1))
    plan = simulation.step()
    assert plan is not None
    assert [c.sequence for c in plan.chunks] == [first]  # the twin waits for it
    assert plan.copies == []
    plan = simulation.step()
    assert plan is not None
    assert plan.copies == [(first.table[1], second.table[1])]
    assert first.table[0] == second.table[0]
    assert first.table[1] != second.table[1]
    assert simulation.scheduler.pool.refs[first.table[0]] == 2
    assert [(c.sequence, c.start, c.end) for c in plan.chunks] == [(second, 6, 7)]
    assert second.cached_tokens == 6
    simulation.run()
    assert first.output != second.output  # each wrote into a block of its own


@pytest.mark.parametrize(("length", "copies"), [(8, 7), (9, 0), (10, 7), (11, 7), (3, 7), (1, 0)])
@pytest.mark.parametrize("depth", [1, 3])
def test_twins_are_prefilled_once(length: int, copies: int, depth: int) -> None:
    """Eight samples of a prompt cost one prefill and one token for each further sample."""
    simulation, sequences = run_all(
        Settings(64, 4, depth=depth), [Job(prompt(length), 5, seed=seed) for seed in range(8)]
    )
    assert simulation.device.computed == length + 7 + 8 * 4
    assert simulation.device.copied == copies
    assert sorted(s.cached_tokens for s in sequences) == [0] + [length - 1] * 7


def test_without_the_prefix_cache_each_twin_computes_its_own_prompt() -> None:
    jobs = [Job(prompt(10), 5, seed=seed) for seed in range(8)]
    simulation, sequences = run_all(Settings(64, 4, prefix_cache=False), jobs)
    assert simulation.device.computed == 8 * 10 + 8 * 4
    assert simulation.device.copied == 0
    assert all(s.cached_tokens == 0 for s in sequences)


def test_without_the_prefix_cache_twins_do_not_wait_for_each_other() -> None:
    simulation = Simulation(Settings(64, 4, prefix_cache=False))
    twins = [simulation.submit(Job(prompt(6), 3, seed=seed)) for seed in range(4)]
    plan = simulation.step()
    assert plan is not None
    assert [c.sequence for c in plan.chunks] == twins
    simulation.run()


def test_others_are_admitted_while_twins_wait_for_their_prompt() -> None:
    simulation = Simulation(Settings(64, 4, token_budget=16))
    first = simulation.submit(Job(prompt(14), 3))
    twin = simulation.submit(Job(prompt(14), 3))
    other = simulation.submit(Job(prompt(14, 1), 3))
    plan = simulation.step()
    assert plan is not None
    assert [c.sequence for c in plan.chunks] == [first, other]
    assert twin.state is State.WAITING
    simulation.run()


def test_a_twin_takes_over_when_the_one_it_waits_for_is_cancelled() -> None:
    simulation = Simulation(Settings(64, 4, token_budget=4))
    first, second = (simulation.submit(Job(prompt(11), 4, seed=seed)) for seed in (0, 1))
    simulation.step()
    simulation.end(first, "cancelled")
    plan = simulation.step()
    assert plan is not None
    # What the first had computed is still there: its first block.
    assert [(c.sequence, c.start, c.end) for c in plan.chunks] == [(second, 4, 8)]
    simulation.run()


def test_blocks_of_the_same_step_are_shared() -> None:
    """All K/V of a step is written before any of it is read, so a common beginning is computed once even then."""
    simulation = Simulation(Settings(64, 4))
    first = simulation.submit(Job([*prompt(8), 1, 2], 3))
    second = simulation.submit(Job([*prompt(8), 3, 4], 3))
    plan = simulation.step()
    assert plan is not None
    assert [(c.sequence, c.start) for c in plan.chunks] == [(first, 0), (second, 8)]
    assert first.table[:2] == second.table[:2]
    simulation.run()


def test_later_requests_find_the_prompt_and_the_completion() -> None:
    """A conversation that goes on: its next prompt is the last one, the answer, and something new."""
    simulation, (first,) = run_all(Settings(64, 4), [Job(prompt(8), 9)])
    computed = simulation.device.computed
    second = simulation.submit(Job(first.prompt + first.output + [7], 1))
    simulation.run()
    assert second.cached_tokens == 16
    assert simulation.device.computed - computed == 2


def test_the_least_recently_used_prompt_is_evicted_first() -> None:
    simulation = Simulation(Settings(8, 4))

    def cached(kind: int) -> int:
        sequence = simulation.submit(Job(prompt(7, kind), 1))
        simulation.run()
        return sequence.cached_tokens

    together = [simulation.submit(Job(prompt(7, kind), 1)) for kind in (1, 2, 3)]  # side by side, two blocks each
    simulation.run()
    assert simulation.scheduler.pool.watermark == simulation.scheduler.pool.idle == 6
    assert [s.cached_tokens for s in together] == [0, 0, 0]
    assert cached(1) == 6  # used again. The copy of its tail took a block of 2, now the oldest,
    assert cached(4) == 0  # and this prompt took the other
    assert cached(3) == 6
    assert cached(2) == 0


def test_idle_blocks_never_grow_the_watermark() -> None:
    """A hundred different prompts one after another live in the memory that the longest of them needs."""
    simulation = Simulation(Settings(10_000, 4))
    for kind in range(100):
        simulation.submit(Job([*prompt(15, kind), kind], 5))
        simulation.run()
    assert simulation.scheduler.pool.watermark == 5 == simulation.device.committed
    assert simulation.scheduler.pool.idle > 0


def test_forgotten_prefixes_are_computed_again() -> None:
    simulation, (first,) = run_all(Settings(64, 4), [Job(prompt(11), 3)])
    simulation.change_weights()
    second = simulation.submit(Job(prompt(11), 3))
    simulation.run()
    assert second.cached_tokens == 0
    assert first.output == second.output


@pytest.mark.parametrize("when", [1, 2, 4])
@pytest.mark.parametrize("budget", [3, 6])  # less and more than a block in the first step
def test_what_runs_while_prefixes_are_forgotten_is_not_recorded(when: int, budget: int) -> None:
    """Its K/V is part old, part new: good enough for itself, not for others."""
    simulation = Simulation(Settings(64, 4, token_budget=budget))
    first = simulation.submit(Job(prompt(11), 12))
    for _ in range(when):
        simulation.step()
    simulation.change_weights()
    twin = simulation.submit(Job(prompt(11), 3))
    simulation.run()
    again = simulation.submit(Job(first.prompt + first.output, 1))
    simulation.run()
    assert twin.cached_tokens == 0
    assert again.cached_tokens <= 13  # from the twin, which began after the change; nothing of the first


def test_trim_gives_everything_back_that_is_not_held() -> None:
    simulation, _ = run_all(Settings(64, 4), [Job(prompt(40), 3)])
    assert simulation.scheduler.pool.watermark == 11
    simulation.trim()
    assert simulation.scheduler.pool.watermark == 0 == simulation.device.committed
    running = simulation.submit(Job(prompt(7), 9))
    simulation.step()
    simulation.trim()
    assert simulation.scheduler.pool.watermark == 2
    assert simulation.device.committed == 2
    assert running.state is State.DECODE
    simulation.run()


def test_a_block_that_is_copied_from_is_not_given_away_in_the_same_plan() -> None:
    """What is given away is cleared, and the first prompt's tail is least recently used when it is matched."""
    simulation = Simulation(Settings(5, 4))
    simulation.submit(Job(prompt(3), 1))
    simulation.submit(Job(prompt(11, 1), 1))
    simulation.run()
    simulation.submit(Job(prompt(3), 1))
    simulation.submit(Job(prompt(11, 2), 1))
    plan = simulation.plan()
    assert plan is not None
    assert len(plan.copies) == 1
    assert len(plan.admitted) == 1
    drain(simulation)
    simulation.run()


# ---- order and fairness ----------------------------------------------------------------------------------------------


def test_a_request_that_does_not_fit_yet_blocks_those_behind_it() -> None:
    simulation = Simulation(Settings(8, 4))
    small = simulation.submit(Job(prompt(12), 8))
    large = simulation.submit(Job(prompt(28, 1), 2))
    smaller = simulation.submit(Job(prompt(2, 2), 2))
    plan = simulation.step()
    assert plan is not None
    assert [c.sequence for c in plan.chunks] == [small]
    while large.state is State.WAITING:
        assert smaller.state is State.WAITING
        simulation.step()
    simulation.run()


def test_with_a_budget_of_one_requests_run_one_after_another() -> None:
    for prefill_first in (False, True):
        simulation = Simulation(Settings(64, 4, token_budget=1, prefill_first=prefill_first))
        sequences = [simulation.submit(Job(prompt(5, kind), 4)) for kind in range(3)]
        ended: list[Sequence] = []
        while simulation.scheduler.has_work:
            assert simulation.step() is not None
            ended += [s for s in sequences if s.state is State.DONE and s not in ended]
        assert ended == sequences
        simulation.check_results()
        assert simulation.steps == simulation.device.computed == 3 * 8


def test_no_more_run_at_once_than_the_budget_can_decode() -> None:
    simulation = Simulation(Settings(64, 4, token_budget=3, max_requests=16))
    for kind in range(8):
        simulation.submit(Job(prompt(2, kind), 12))
    most = 0
    while simulation.scheduler.has_work:
        simulation.step()
        most = max(most, simulation.scheduler.running)
    assert most == 3
    simulation.check_results()


def test_prefill_first_lets_decodes_wait_but_not_for_long() -> None:
    simulation = Simulation(Settings(1000, 4, token_budget=8, prefill_first=True))
    first = simulation.submit(Job(prompt(7), 40))
    simulation.step()
    for kind in range(1, 4):
        simulation.submit(Job(prompt(200, kind), 1))
    decoded = []
    for _ in range(30):
        plan = simulation.step()
        assert plan is not None
        assert plan.chunks
        decoded.append(first in plan.sequences)
    begin = decoded.index(True)
    assert begin <= PATIENCE
    assert decoded[begin:] == (([True] + [False] * PATIENCE) * 6)[: len(decoded) - begin]
    simulation.run()


def test_prefill_first_gives_decodes_what_prefills_leave_in_turns() -> None:
    simulation = Simulation(Settings(1000, 4, token_budget=8, prefill_first=True))
    decoding = [simulation.submit(Job(prompt(1, kind), 60)) for kind in range(4)]
    simulation.step()
    shares = dict.fromkeys(decoding, 0)
    for kind in range(4, 24):
        simulation.submit(Job(prompt(6, kind), 1))  # each step: one prompt of six tokens, and room for two decodes
        plan = simulation.step()
        assert plan is not None
        assert len(plan.chunks) == 1
        assert len(plan.sequences) == 2
        for sequence in plan.sequences:
            shares[sequence] += 1
    assert set(shares.values()) == {10}
    simulation.run()


def test_fifo_gives_every_running_sequence_a_token_in_every_step() -> None:
    simulation = Simulation(Settings(1000, 4, token_budget=8))
    first = simulation.submit(Job(prompt(8), 40))
    simulation.step()
    for kind in range(1, 4):
        simulation.submit(Job(prompt(60, kind), 1))
    for _ in range(20):
        plan = simulation.step()
        assert plan is not None
        assert first in plan.sequences
        assert plan.num_tokens == 8
    simulation.run()


# ---- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("prefill_first", [True, False])
def test_a_preempted_sequence_resumes_with_the_same_output(depth: int, prefix_cache: bool, prefill_first: bool) -> None:
    settings = Settings(6, 2, depth=depth, prefix_cache=prefix_cache, prefill_first=prefill_first)
    simulation, sequences = run_all(settings, [Job(prompt(3, kind), 9) for kind in range(3)])
    assert simulation.scheduler.preemptions > 0
    assert sequences[0].preemptions == 0  # the oldest goes on
    assert sum(s.preemptions for s in sequences) == simulation.scheduler.preemptions


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    """All that were not needed by others meanwhile. They do not count as cached: it had computed them itself."""
    simulation = Simulation(Settings(11, 2))
    first = simulation.submit(Job(prompt(3), 6))
    second = simulation.submit(Job(prompt(16, 1), 6))
    simulation.run()
    assert (first.preemptions, second.preemptions) == (0, 1)
    again = simulation.device.computed - first.positions - second.positions
    assert 0 < again <= 4
    assert second.cached_tokens == 0


def test_a_preempted_sequence_goes_back_to_the_head_of_the_queue() -> None:
    simulation = Simulation(Settings(6, 2, max_requests=2))
    first = simulation.submit(Job(prompt(3, 0), 9))
    second = simulation.submit(Job(prompt(3, 1), 9))
    third = simulation.submit(Job(prompt(1, 2), 1))
    while not second.preemptions:
        simulation.step()
    assert list(simulation.scheduler.waiting) == [second, third]
    assert first.state is State.DECODE
    assert second.output  # kept: the prompt is computed again together with it
    simulation.run()


def test_the_oldest_waits_rather_than_go_when_every_other_is_in_the_plan() -> None:
    """prefill_first: the newer one's chunk is already planned, so it cannot be preempted in this step."""
    simulation = Simulation(Settings(10, 1, token_budget=2, prefill_first=True))
    oldest = simulation.submit(Job(prompt(1), 3))
    simulation.step()
    simulation.submit(Job(prompt(8, 1), 1))
    waited = 0
    while simulation.scheduler.has_work:
        wants = oldest.state is State.DECODE
        plan = simulation.step()
        assert plan is not None
        waited += wants and oldest not in plan.sequences and plan.num_tokens < 2
        assert oldest.preemptions == 0
    assert waited, "the workload no longer leads to the case"
    simulation.check_results()


def test_a_sequence_waits_when_only_older_ones_could_be_preempted() -> None:
    """Giving up its own blocks would not help anyone: they are taken as soon as an older one needs them."""
    simulation = Simulation(Settings(4, 2, depth=3))
    older = simulation.submit(Job(prompt(3, 0), 2))
    newer = simulation.submit(Job(prompt(3, 1), 5))
    simulation.plan()  # both prompts
    simulation.plan()  # both last slots
    assert simulation.plan() is None  # the older one has all it needs; the newer one needs a block
    assert simulation.scheduler.preemptions == 0
    drain(simulation)
    assert older.state is State.DONE
    simulation.run()
    assert newer.preemptions == 0


def test_one_block_is_kept_in_reserve_for_each_running_sequence() -> None:
    """Otherwise the next step would preempt what this one admits."""
    simulation = Simulation(Settings(5, 4))
    simulation.submit(Job(prompt(8), 4))
    second = simulation.submit(Job(prompt(9, 1), 2))
    simulation.step()
    assert second.state is State.WAITING  # three blocks are free and three are needed, but the first will need one
    simulation.run()
    assert simulation.scheduler.preemptions == 0


def test_cached_blocks_that_a_prompt_would_take_back_count_as_needed() -> None:
    """They are idle, so they are available; but to whoever asks first."""
    simulation = Simulation(Settings(6, 4))
    simulation.submit(Job(prompt(8, 1), 1))
    simulation.submit(Job(prompt(9, 2), 8))
    simulation.step()
    assert simulation.scheduler.pool.idle == 2  # of the first; the second holds three, and will need a fourth
    third = simulation.submit(Job([*prompt(8, 1), 0], 1))
    simulation.step()
    assert third.state is State.WAITING  # two blocks to take back, one new, and one in reserve: four, of three
    simulation.run()
    assert simulation.scheduler.preemptions == 0


# ---- memory that cannot be had ---------------------------------------------------------------------------------------


def test_refused_memory_preempts_the_newest_and_later_goes_on() -> None:
    settings = Settings(100, 2, short=((4, 40),))
    simulation, sequences = run_all(settings, [Job(prompt(3, kind), 30) for kind in range(3)])
    assert simulation.scheduler.preemptions > 0
    assert sequences[0].preemptions == 1  # not before it was alone
    assert simulation.steps > 40  # all three need more blocks than there were until then


def test_a_sequence_alone_goes_back_to_the_queue_when_memory_is_refused() -> None:
    """So the engine sees: nothing runs, something waits, no plan can be made."""
    simulation = Simulation(Settings(100, 2, short=((3, 20),)))
    sequence = simulation.submit(Job(prompt(3), 9))
    for _ in range(2):
        assert simulation.step() is not None
    assert simulation.step() is None
    assert (simulation.scheduler.running, list(simulation.scheduler.waiting)) == (0, [sequence])
    assert sequence.output  # kept
    simulation.run()
    assert simulation.steps >= 20
    assert sequence.preemptions == 1


def test_a_twin_that_runs_alone_gives_up_copying_the_tail_when_memory_does_not_grow() -> None:
    """The capacity promises one block more, for the moment of the copy; the memory for it is not there."""
    simulation, _ = run_all(Settings(4, 4, grow_limit=2), [Job(prompt(7), 1)])
    twin = simulation.submit(Job(prompt(7), 1))
    simulation.run()
    assert twin.cached_tokens == 4
    assert simulation.device.copied == 0


# ---- leaving early ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.WAITING, State.PREFILL, State.DECODE, State.DONE])
def test_finish_in_every_state(state: State) -> None:
    simulation = Simulation(Settings(64, 4, token_budget=8, max_requests=2))
    neighbour = simulation.submit(Job(prompt(3, 1), 9))
    sequence = simulation.submit(Job(prompt(12), 5))
    while sequence.state is not state:
        simulation.step()
    done_with = sequence.finish_reason
    simulation.end(sequence, "cancelled")
    assert sequence.state is State.DONE
    assert sequence.finish_reason == (done_with or "cancelled")
    assert sequence.table == []
    held = set(neighbour.table)
    assert simulation.scheduler.pool.held == len(held)
    simulation.run()


def test_a_result_under_way_for_a_finished_sequence_is_dropped() -> None:
    simulation = Simulation(Settings(64, 4, depth=3))
    gone = simulation.submit(Job(prompt(3), 9))
    stays = simulation.submit(Job(prompt(3, 1), 9))
    simulation.plan()
    simulation.plan()
    simulation.commit()
    simulation.end(gone, "cancelled")
    landed = simulation.commit()
    assert landed.sequences == [stays]
    assert landed.indices == [1]
    assert len(gone.output) == 1
    simulation.run()


def test_a_late_result_of_a_former_row_owner_is_dropped() -> None:
    simulation = Simulation(Settings(64, 4, depth=3, max_requests=1))
    former = simulation.submit(Job(prompt(3), 9))
    simulation.plan()
    plan = simulation.plan()
    assert plan is not None
    assert plan.sequences == [former]
    row = former.row
    simulation.end(former, "cancelled")
    owner = simulation.submit(Job(prompt(3, 1), 9))
    simulation.plan()
    assert owner.row == row  # the same row, and its first token is still under way
    for _ in range(2):
        assert simulation.commit().sequences == []
    assert (former.output, owner.output) == ([], [])
    assert simulation.commit().sequences == [owner]
    simulation.run()


def test_eos_that_lands_late_ends_the_sequence_there() -> None:
    """Running ahead, the device has computed further tokens by then. They are not part of the output."""
    job = next(j for j in (Job(prompt(4, kind), 20, eos=[0]) for kind in range(50)) if len(j.alone[0]) == 3)
    simulation, (sequence,) = run_all(Settings(64, 4, depth=3), [job])
    assert sequence.output == job.alone[0]
    assert simulation.device.computed > 4 + 2


def test_non_finite_logits_end_one_sequence_and_not_its_neighbours() -> None:
    jobs = [Job(prompt(5, kind), 20, fragile=kind % 2 == 0) for kind in range(40)]
    _, sequences = run_all(Settings(1000, 4, depth=2), jobs)
    reasons = [s.finish_reason for s in sequences]
    assert set(reasons[1::2]) == {"length"}
    assert reasons[0::2].count("error") > 5


def test_blocks_of_a_sequence_that_ended_in_error_are_not_kept() -> None:
    job = next(
        job
        for job in (Job(prompt(9, kind), 20, fragile=True) for kind in range(50))
        if job.alone[1] == "error" and job.alone[0]
    )
    simulation, (sequence,) = run_all(Settings(64, 4), [job])
    assert sequence.finish_reason == "error"
    assert simulation.scheduler.pool.idle == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_abort_all_ends_everything_and_the_scheduler_can_be_used_again(depth: int) -> None:
    simulation = Simulation(Settings(32, 4, token_budget=8, depth=depth))
    simulation.submit(Job(prompt(60), 9))
    simulation.run()
    for kind in range(1, 7):
        simulation.submit(Job(prompt(9, kind), 9))
    for _ in range(2):
        simulation.step()
    assert simulation.scheduler.pool.idle > 0
    simulation.fail_step()
    assert simulation.scheduler.pool.idle == 0
    again = [simulation.submit(Job(prompt(9, kind), 9)) for kind in range(6)]
    simulation.run()
    assert {s.finish_reason for s in again} == {"length"}


def test_a_successor_starts_empty_over_the_same_memory() -> None:
    """After Ctrl-C in the middle of the books. What the old scheduler handed out may hold anything and is cleared."""
    simulation = Simulation(Settings(16, 4, token_budget=16))
    simulation.submit(Job(prompt(11), 9))
    simulation.step()
    used = simulation.scheduler.pool.watermark
    successor = simulation.scheduler.successor()
    assert (successor.pool.watermark, successor.has_work, len(successor.prefix)) == (0, False, 0)
    again = Sequence("again", 0, prompt(23), 2, frozenset(), successor.group(prompt(23)))
    successor.submit(again)
    plan = successor.plan()
    assert plan is not None
    assert plan.step > simulation.scheduler.step
    assert again.cached_tokens == 0
    assert plan.reused == list(range(used))
    assert len(again.table) > used
    successor.check()


def test_a_group_may_be_taken_long_before_its_sequence_is_submitted() -> None:
    """One sample of a request is over before the next is submitted; the group must not be lost between the two."""
    scheduler = Scheduler(16, 4, token_budget=8, max_requests=4)
    group = scheduler.group([1, 2, 3])
    first, second = (Sequence("r", sample, [1, 2, 3], 1, frozenset(), group) for sample in (0, 1))
    for sequence in (first, second):
        scheduler.submit(sequence)
        scheduler.check()
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, np.array([7]))
        scheduler.check()
        assert sequence.output == [7]


def test_check_notices_a_wrong_reference_count() -> None:
    simulation = Simulation(Settings(16, 4))
    sequence = simulation.submit(Job(prompt(7), 5))
    simulation.step()
    simulation.scheduler.pool.hold(sequence.table[0])
    with pytest.raises(AssertionError, match="2 references, 1 uses"):
        simulation.scheduler.check()


def test_check_notices_a_table_that_disagrees() -> None:
    simulation = Simulation(Settings(16, 4))
    sequence = simulation.submit(Job(prompt(7), 5))
    simulation.step()
    simulation.scheduler.rows.tables[sequence.row, 1] += 1
    with pytest.raises(AssertionError, match="tables disagree"):
        simulation.scheduler.check()
