"""The learning rate of each step."""

from core.scheduler import CosineLRScheduler


def test_schedule_warms_up_decays_and_stays():
    lr = CosineLRScheduler(1.0, 0.1, warmup_iters=4, lr_decay_iters=14).lr
    assert [lr(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert lr(4) == 1.0 and abs(lr(9) - 0.55) < 1e-12 and abs(lr(14) - 0.1) < 1e-12 and lr(99) == lr(14)


def test_a_schedule_without_warm_up_begins_at_the_top_and_never_rises():
    rates = [CosineLRScheduler(1.0, 0.2, warmup_iters=0, lr_decay_iters=8).lr(step) for step in range(12)]
    assert rates[0] == 1.0 and rates == sorted(rates, reverse=True) and abs(rates[-1] - 0.2) < 1e-12


def test_a_schedule_without_a_lowest_rate_ends_at_a_tenth_of_the_highest():
    assert abs(CosineLRScheduler(1e-5, None, warmup_iters=0, lr_decay_iters=8).lr(8) - 1e-6) < 1e-18
