"""Every name of Monarch's private API that this project uses, why, and what stands in for it.

    meshes, the store ──> a function here ──┬──> a name of `PRIVATE`
                                            └──> Monarch's public API     runtime.monarch.private_api=false

A private name may change with any release of Monarch, so no other file names one: a test reads the sources
for that, and another one names those of `PRIVATE` that are missing. What is only overridden is not called.

Import this before anything of Monarch's: the environment below is read once, when Monarch is first imported.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import importlib
import inspect
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

SETTINGS = {
    # A dead process is then noticed within 2 s instead of 10.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    # The runtime's own bound. (A process that answers after 30 s is lost all the same: see `WAIT_S` in
    # meshes/common/warm_stub.py.)
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "120s",
    "HYPERACTOR_MESH_ACTOR_SPAWN_MAX_IDLE": "120s",
    "HYPERACTOR_HOST_SPAWN_READY_TIMEOUT": "120s",
    # TorchStore warns on the terminal if it is not set when it is imported; 10 GiB is the value it asks for.
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": str(10 * 1024**3),
}
for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)

PRIVATE_API_VARIABLE = "NEOPROTO_MONARCH_PRIVATE_API"
"""Tells processes of the run: "0" is `runtime.monarch.private_api=false`."""
JOB_LOGGER = "monarch._src.job.job"
"""The name of the logger that gets a terminal handler of its own when Monarch's jobs are imported."""


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a private name.

    Attributes:
        reason: what the name is used for.
        instead: what is done without it.
    """

    reason: str
    instead: str


_FAST = Use(
    "Monarch's public ports pickle in Python and receive on its runtime: a message takes 1.5 times as long.",
    "Channel.open(), Port.send() and PortReceiver.recv(), with a pickle of ours inside.",
)
_SUBCLASS = Use(
    "A job of a new kind overrides it: Monarch has no public name for that.", "It is never called."
)

BOOTSTRAP = "monarch._src.actor.bootstrap_main"
"""The module that Monarch's processes run."""
_ACTOR = "monarch._src.actor.actor_mesh"
_MESSAGES = "monarch._rust_bindings.monarch_hyperactor"
_JOBS = "monarch._src.job"

PRIVATE: Mapping[str, Use] = {
    f"{_MESSAGES}.actor:PythonMessage": _FAST,
    f"{_MESSAGES}.actor:PythonMessageKind.Result": _FAST,
    f"{_MESSAGES}.buffers:Buffer": _FAST,
    f"{_MESSAGES}.mailbox:Mailbox.open_port": _FAST,
    f"{_MESSAGES}.mailbox:PortHandle.bind": _FAST,
    f"{_MESSAGES}.mailbox:PortReceiver.recv_task": _FAST,
    f"{_MESSAGES}.pytokio:PythonTask.block_on": _FAST,
    f"{_ACTOR}:Instance._mailbox": _FAST,
    f"{_ACTOR}:Instance._as_rust": _FAST,
    f"{_ACTOR}:Port._send_message": _FAST,
    f"{_ACTOR}:_client_context.try_get": Use(
        "Says whether the process has a root client, without making one.",
        "A client counts if `pin_context` made it.",
    ),
    f"{_ACTOR}:Actor._handle_undeliverable_message": Use(
        "An actor overrides it, so that a message to a process that has died does not end the sender.",
        "It is never called.",
    ),
    "monarch._src.actor.endpoint:EndpointProperty._method": Use(
        "TorchStore's controller is used as a plain object: this is the method below an endpoint.",
        "The function among the endpoint's attributes.",
    ),
    "monarch._src.actor.proc_mesh:_ControllerController._controllers": Use(
        "Monarch keeps an actor, with a thread and seven descriptors, for each name that stock clients look "
        "up. This lets one actor answer for one store after another.",
        "Each store has a new one, which stays as long as the program.",
    ),
    f"{BOOTSTRAP}:invoke_main": Use(
        "A worker runs this module once its output goes to its log.",
        "None: `default_bootstrap_cmd()` names the same module.",
    ),
    f"{_JOBS}.job:JobTrait._running": Use(
        "The applied job that is behind a loaded one.", "The loaded one itself, if it is `active`."
    ),
    f"{_JOBS}.job:JobTrait._is_running": Use("Asks whether an applied job is alive.", "can_run(itself)."),
    f"{_JOBS}.job:JobTrait._prepare_client_gateway": Use(
        "Says by which transport the hosts are reached, before this process's client is made.",
        "state(), which does it too and connects.",
    ),
    f"{_JOBS}.job_state:JobState._hosts": Use(
        "The meshes of a job, by name.", "Those that the topology names."
    ),
    f"{_JOBS}.process:ProcessJob._meshes": Use(
        "How many hosts a job declares, before it is connected to.",
        "They are counted when it is connected to.",
    ),
    f"{_JOBS}.process:ProcessJob._host_to_pid": Use(
        "Which processes of this machine are hosts, so that their deaths are reported by name.",
        "Hosts are not watched; the deaths of their workers are.",
    ),
    f"{_JOBS}.job:JobTrait._create": _SUBCLASS,
    f"{_JOBS}.job:JobTrait._kill": _SUBCLASS,
    f"{_JOBS}.process:ProcessJob._state": Use(
        "Overridden: the hosts of a private job are watched while Monarch waits for them.",
        "Hosts are not watched.",
    ),
}
"""module:name → its use. A name that a class sets in `__init__` is listed as the class's."""


def missing() -> list[str]:
    """One sentence for each private name that this Monarch does not have."""
    return [
        f"Monarch has no {name} any more. {PRIVATE[name].reason}" for name in PRIVATE if not _exists(name)
    ]


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    *classes, last = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in classes:
            owner = getattr(owner, part)
    except (ImportError, AttributeError):
        return False
    made = getattr(getattr(owner, "__init__", None), "__code__", None)
    return hasattr(owner, last) or (made is not None and last in made.co_names)


# ---- Which way ----

_allowed = os.environ.get(PRIVATE_API_VARIABLE) != "0"


def use_private_api(allowed: bool) -> None:
    """Set for this process what the run's configuration sets. Its children read `PRIVATE_API_VARIABLE`."""
    global _allowed
    _allowed = allowed


def private_api() -> bool:
    """Whether private names may be used."""
    return _allowed


def _private(name: str) -> Any:
    """What a listed name stands for."""
    if not _allowed:
        raise AssertionError(f"{name} is used although runtime.monarch.private_api is false")
    return _found(name)


@functools.cache
def _found(name: str) -> Any:
    assert any(f"{listed}.".startswith(f"{name}.") for listed in PRIVATE), f"{name} is not in the list"
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


# ---- Contexts ----

_pinned: tuple[contextvars.ContextVar[Any], Any] | None = None
_made_client = False


def settings() -> dict[str, str]:
    """What processes need in their environment that do not inherit this one's."""
    return {name: os.environ[name] for name in SETTINGS}


def pin_context(*, client: bool = False) -> Any:
    """Remember this thread's Monarch context for threads without one, and return its actor instance.

    Args:
        client: this is the root client's process, which gets its client by this call if it has none.
    """
    global _pinned, _made_client
    from monarch.actor import context

    own = context()
    _pinned = next(
        (variable, value) for variable, value in contextvars.copy_context().items() if value is own
    )
    _made_client = _made_client or client
    return own.actor_instance


def ensure_context() -> None:
    """Give this thread the pinned context if it has none: `context()` would make a second root client."""
    if _pinned is not None:
        variable, value = _pinned
        if variable.get(None) is None:
            variable.set(value)


def has_context() -> bool:
    """Whether `context()` finds one on this thread; True also where that cannot be known."""
    from monarch.actor import Context

    if any(isinstance(value, Context) for value in contextvars.copy_context().values()):
        return True
    return client_exists() or not _allowed


def client_exists() -> bool:
    """Whether this process has a root client of Monarch's: workers have none."""
    return _made_client or (_allowed and _private(f"{_ACTOR}:_client_context.try_get")() is not None)


# ---- Ports ----


def open_port(instance: Any) -> tuple[bytes, Callable[[], Callable[[], Any]]]:
    """A new port of an actor: its address for other processes, and what waits there for the next message.

    That returns a function which decodes the message. Call it where Monarch's context is.
    """
    if not _allowed:
        from monarch.actor import Channel

        port, public = Channel.open()
        # A sender would end by the news that the receiver is gone.
        port.return_undeliverable = False

        def receive_public() -> Callable[[], Any]:
            payload = public.recv().get()
            return lambda: pickle.loads(payload)

        return cloudpickle.dumps(port), receive_public

    handle, receiver = instance._mailbox.open_port()

    def receive() -> Callable[[], Any]:
        decode: Callable[[], Any] = receiver.recv_task().block_on().decode
        return decode

    return pickle.dumps(handle.bind()), receive


def sending_port(address: bytes, instance: Any) -> tuple[Any, bool]:
    """What `send` takes to send to a port as the given actor. Call it where Monarch's context is."""
    from monarch.actor import Port

    found: Any = pickle.loads(address)
    public = isinstance(found, Port)
    port = found if public else Port(found, instance._as_rust(), 0)
    port.return_undeliverable = False
    return port, public


def send(payload: bytes, ports: Iterable[tuple[Any, bool]]) -> None:
    """Send a pickle to some ports. Does not wait."""
    ready: Any = None
    for port, public in ports:
        if public:
            port.send(payload)
            continue
        if ready is None:  # one message, and one copy of its bytes, for all
            message, result, buffer_of = _message_types()
            buffer = buffer_of()
            buffer.write(payload)
            ready = message(result(0), buffer.freeze(), [])
        port._send_message(ready)


@functools.cache
def _message_types() -> tuple[Any, Any, Any]:
    return (
        _private(f"{_MESSAGES}.actor:PythonMessage"),
        _private(f"{_MESSAGES}.actor:PythonMessageKind.Result"),
        _private(f"{_MESSAGES}.buffers:Buffer"),
    )


# ---- Processes ----


def bootstrap_command(program: str, arguments: list[str], env: Mapping[str, str | None]) -> Any:
    """How Monarch starts a process; `env` is laid over its host's environment, None removes a variable."""
    from monarch.actor import default_bootstrap_cmd

    return type(default_bootstrap_cmd())(program, None, arguments, env)


# ---- Jobs ----


def applied_job(loaded: Any) -> Any:
    """The applied job of a loaded one that is alive; None if it is not."""
    if not _allowed:
        return loaded if loaded.active and loaded.can_run(loaded) else None
    running = loaded._running
    return running if running is not None and running._is_running() else None


def prepare_client(job: Any) -> None:
    """Have this process's client, which there is none of yet, listen where the job's hosts reach it."""
    if _allowed:
        job._prepare_client_gateway()
    else:
        job.state()


def host_meshes(job: Any, names: Iterable[str]) -> dict[str, Any]:
    """The job's meshes by name: all, or without the private API those of `names` that it has."""
    state = job.state()
    if _allowed:
        return dict(state._hosts)
    return {name: getattr(state, name) for name in names if hasattr(state, name)}


def declared_meshes(job: Any) -> Mapping[str, Any] | None:
    """The meshes that a job lists without a connection to it; None where that is not known."""
    declared = getattr(job, "_meshes", None) if _allowed else None
    return declared if isinstance(declared, Mapping) else None


def host_pids(job: Any) -> dict[str, int]:
    """Processes of this machine that are hosts of a job, by the job's name for them; none where not known."""
    known = getattr(job, "_host_to_pid", {}) if _allowed else {}
    return {name: one.pid for name, one in known.items()}


# ---- Actors that are looked up by name ----


def rename_controller(name: str, actor: Any) -> bool:
    """Let `get_or_spawn_controller(name)` lead to this actor; False: it cannot be done.

    To be removed when Monarch can stop such an actor.
    """
    if not _allowed:
        return False
    kind = _private("monarch._src.actor.proc_mesh:_ControllerController")
    # Not all objects: a list of them would keep what another thread is ending, and end it on this one.
    for item in gc.get_referrers(kind):
        if type(item) is kind:
            item._controllers[name] = actor
    return True


def endpoint_method(endpoint: Any) -> Any:
    """The method that an endpoint of an actor class was made of."""
    if not _allowed:
        return next(value for value in vars(endpoint).values() if inspect.isfunction(value))
    return endpoint._method
