"""The loop that supervised and reinforcement learning share: step, evaluate, save, until the last step or a signal."""


def run_loop(trainer, stop):
    """Takes the steps of a trainer, evaluating and saving on the way. Returns whether a signal ended it early.

    trainer: has config, dist, logger, step, evaluated (whether the evaluation of this step, if it has one, is done),
             stopped_by, bad (a BadSteps), and the methods
        train_step()         takes one optimizer step and counts it; returns its metrics
        log_step(metrics)    logs them
        evaluation_is_due()  tells whether an evaluation follows this step; one always follows the last
        run_evaluation()     evaluates on held-out data and logs the metrics
        save()               writes the model and the state to resume from
        report()             shows the run so far, after an evaluation
    stop: a StopSignal
    """
    c, save_is_due = trainer.config, False
    if not trainer.evaluated:  # a new run, or one that a signal stopped before the evaluation of its step
        trainer.run_evaluation()
        trainer.dist.barrier()
        trainer.evaluated = True
        trainer.report()
    trainer.logger.restart_clock()
    while trainer.step < c.max_iters:
        trainer.log_step(trainer.train_step())
        last = trainer.step == c.max_iters
        signal = stop.came()
        evaluates = last or trainer.evaluation_is_due()
        # Whoever sends a signal does not wait for an evaluation: the resumed run makes it up
        trainer.evaluated = last or not (signal and evaluates)
        if evaluates and trainer.evaluated:
            trainer.run_evaluation()
            trainer.dist.barrier()
            signal = stop.came()
        save_is_due = save_is_due or trainer.step % c.save_interval == 0
        in_good_state = not trainer.bad.in_a_row  # a good state is not replaced by one from the middle of bad steps
        if last or signal or (save_is_due and in_good_state):
            trainer.save()
            save_is_due = False
        if evaluates and trainer.evaluated:
            trainer.report()
        trainer.logger.tick()
        if signal and not last:
            trainer.stopped_by = signal
            trainer.logger.say(f"stopped by {signal} after step {trainer.step}; go on with --resume=True")
            return True
    return False
