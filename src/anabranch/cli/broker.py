"""Running one broker, without the rest of the command line, whose libraries take half a second to import.

`OPTIONS` declares the options of `anabranch serve`, for both ways to read them: `options_of` reads them as long as
nothing needs explaining; the whole command line, which has typer's help and checks, reads everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from anabranch.base.errors import AnabranchError
from anabranch.server import settings as table
from anabranch.server.settings import Settings

if TYPE_CHECKING:
    from anabranch.runtime.collector import Collector

EXIT_FAILED = 1
EXIT_USAGE = 2
BLOCKS_PER_PARTITION = 40
"""Blocks of memory that a partition without records takes, at least."""
SWITCH_INTERVAL_S = 0.001
"""How long a thread whose sync is done may wait for the busy loop: part of the latency of acks=all."""


@dataclass(slots=True)
class Options:
    """The options of one command line, by the fields that `OPTIONS` names."""

    config: Path | None = None
    given: list[str] = field(default_factory=list)
    data: Path | None = None
    listen: str | None = None


class Option(NamedTuple):
    """One option of `anabranch serve`."""

    name: str
    field: Literal["config", "given", "data", "listen"]
    """Its field of `Options`."""
    kind: Literal["path", "text", "texts"]
    help: str


OPTIONS = (
    Option("--config", "config", "path", "A properties file with settings."),
    Option("--set", "given", "texts", "A setting, as name=value; may be repeated."),
    Option("--data", "data", "path", "The data directory (log.dirs)."),
    Option("--listen", "listen", "text", "HOST:PORT to listen on (listeners)."),
)
_BY_NAME = {option.name: option for option in OPTIONS}


def options_of(arguments: Sequence[str]) -> Options | None:
    """Read `serve --name value ...`; None for another command, or where something needs explaining."""
    if not arguments or arguments[0] != "serve":
        return None
    options = Options()
    rest = iter(arguments[1:])
    for argument in rest:
        name, equals, value = argument.partition("=")
        option = _BY_NAME.get(name)
        found = value if equals else next(rest, None)
        if option is None or found is None:
            return None
        if option.kind == "texts":
            getattr(options, option.field).append(found)
        else:
            setattr(options, option.field, Path(found) if option.kind == "path" else found)
    return options


def serve_broker(options: Options) -> int:
    """Run a broker until SIGTERM or SIGINT; return the exit code."""
    try:
        chosen = load_settings(options)
    except (AnabranchError, OSError) as error:
        print(f"anabranch: {error}", file=sys.stderr)
        return EXIT_USAGE
    return run(chosen)


def load_settings(options: Options) -> Settings:
    """Merge the sources of settings: file, environment, --set, --data and --listen, later ones override."""
    options_of = {"log.dirs": options.data, "listeners": options.listen}
    return Settings.of(
        table.layered(
            {} if options.config is None else table.read_properties(options.config.read_text()),
            table.from_environment(os.environ),
            table.read_properties("\n".join(options.given)),
            {name: str(value) for name, value in options_of.items() if value is not None},
        )
    )


def raise_file_limit() -> None:
    """Raise the soft limit of open files, sockets among them, to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(settings: Settings) -> int:
    """Run a broker until SIGTERM or SIGINT; return the exit code."""
    raise_file_limit()
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    import uvloop

    from anabranch.runtime import events as logs
    from anabranch.runtime.collector import Collector

    logs.set_up(settings.log_format, settings.log_level)
    collector = Collector()
    with collector.installed(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings, collector))


async def _run(settings: Settings, collector: Collector) -> int:
    from anabranch.runtime.events import EventLogger
    from anabranch.server.broker import Broker

    events = EventLogger("serve")
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            events.warning("second signal to stop: stopped at once")
            os._exit(EXIT_FAILED)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    broker = Broker(settings)
    try:
        await broker.start()
    except (AnabranchError, OSError) as error:
        await broker.abandon()
        events.error("the broker cannot start", reason=error)
        return EXIT_FAILED
    events.info(
        "ready",
        listener=broker.address,
        node_id=settings.node_id,
        cluster_id=broker.context.cluster_id,
        data=settings.log_dirs,
        durability=settings.durability,
        metrics_port=broker.metrics_port,
    )
    collecting = loop.create_task(
        collector.run(lambda: not broker.connections, lambda: BLOCKS_PER_PARTITION * broker.partitions)
    )
    await stopping.wait()
    collecting.cancel()
    events.info("stopping")
    sound = await broker.stop()
    events.info("stopped", clean=sound)
    return 0 if sound else EXIT_FAILED
