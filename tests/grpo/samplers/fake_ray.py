"""In the place of the package ray: workers in this process, whose deaths and delays a test decides."""

import collections


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class Actor:
    """A worker. `plan` holds what happens to its next calls of `write`: "ok" (the default), "dies" or "hangs"."""

    def __init__(self, worker, ray):
        self.worker, self.ray, self.alive, self.plan = worker, ray, True, ray.plans.popleft() if ray.plans else []
        self.plan = list(self.plan)

    def __getattr__(self, name):
        return collections.namedtuple("Method", "remote")(lambda *arguments: self.call(name, arguments))

    def call(self, name, arguments):
        """A promise: (what happens, value)."""
        if name == "__ray_terminate__":
            self.ray.asked.append(self.ray.actors.index(self))
            return Promise("lost", RayError("The actor exited"))
        fate = self.plan.pop(0) if name == "write" and self.plan else "ok"
        if name == "write":
            self.ray.written.append((self.ray.actors.index(self), list(arguments[0]["number"]), arguments[1]))
        if not self.alive or fate == "dies":
            self.alive = False
            return Promise("lost", RayError("The actor died\nexit code 9"))
        if fate == "hangs":
            return Promise("late", None)
        try:
            return Promise("done", getattr(self.worker, name)(*arguments))
        except ValueError as error:
            return Promise("failed", RayTaskError(f"traceback\nValueError: {error}"))


class Promise:
    def __init__(self, fate, value):
        self.fate, self.value = fate, value


class FakeRay:
    """plans: for each worker that is started, in order, what happens to its calls of write."""

    exceptions = collections.namedtuple("Exceptions", "RayError RayTaskError")(RayError, RayTaskError)

    def __init__(self, plans=()):
        self.plans, self.actors, self.killed, self.written, self.stored = collections.deque(plans), [], [], [], []
        self.asked, self.left = [], False

    def remote(self, **options):
        def decorated(cls):
            def start():
                self.actors.append(Actor(cls(), self))
                return self.actors[-1]
            return collections.namedtuple("Class", "remote")(start)
        return decorated

    def put(self, value):
        self.stored.append(value)
        return value

    def wait(self, promises, num_returns=1, timeout=None):
        ready = [promise for promise in promises if promise.fate != "late"]
        return ready, [promise for promise in promises if promise.fate == "late"]

    def get(self, promise, timeout=None):
        if isinstance(promise.value, RayError):
            raise promise.value
        return promise.value

    def kill(self, actor):
        actor.alive = False
        self.killed.append(self.actors.index(actor))

    def available_resources(self):
        return {"CPU": 0.0, "memory": 1.0}

    def leave(self):
        self.left = True
