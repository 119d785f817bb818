"""`anabranch serve`: one broker, until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from anabranch.base.errors import AnabranchError
from anabranch.server import settings as table
from anabranch.server.settings import Settings

EXIT_FAILED = 1
EXIT_USAGE = 2


def serve(
    config: Annotated[Path | None, typer.Option(help="A properties file with settings.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A setting, as name=value; may be repeated.")] = None,
    data: Annotated[Path | None, typer.Option(help="The data directory (log.dirs).")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT to listen on (listeners).")] = None,
    settings: Annotated[bool, typer.Option("--settings", help="List every setting, then exit.")] = False,
) -> None:
    """Run a broker: on localhost:9092, with its data in ./anabranch-data, unless you say otherwise.

    Settings have Kafka's names. They come from --config, the environment (ANABRANCH_LOG_DIRS is log.dirs) and --set.
    """
    if settings:
        for item in table.described():
            typer.echo(f"{item.name} ({item.kind}, default {item.default or 'empty'})\n    {item.doc}")
        return
    try:
        chosen = load_settings(config, set_ or [], data, listen)
    except (AnabranchError, OSError) as error:
        typer.echo(f"anabranch: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None
    raise typer.Exit(run(chosen))


def load_settings(config: Path | None, given: list[str], data: Path | None, listen: str | None) -> Settings:
    """Put the settings together, later sources winning."""
    properties: dict[str, str] = {}
    if config is not None:
        properties.update(table.read_properties(config.read_text()))
    properties.update(table.from_environment(os.environ))
    properties.update(table.read_properties("\n".join(given)))
    if data is not None:
        properties["log.dirs"] = str(data)
    if listen is not None:
        properties["listeners"] = listen
    return Settings.of(properties)


def run(settings: Settings) -> int:
    """Run a broker until a signal; the exit code."""
    import uvloop

    from anabranch.server import logs

    logs.set_up(settings.log_format, settings.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings))


async def _run(settings: Settings) -> int:
    from anabranch.server.broker import Broker
    from anabranch.server.logs import Say

    say = Say("serve")
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            say.warning("told to stop a second time: stopped at once")
            os._exit(EXIT_FAILED)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    broker = Broker(settings)
    try:
        await broker.start()
    except (AnabranchError, OSError) as error:
        broker.abandon()
        say.error("the broker cannot start", reason=error)
        return EXIT_FAILED
    say.info(
        "ready",
        listener=broker.address,
        node_id=settings.node_id,
        cluster_id=broker.node.cluster_id,
        data=settings.log_dirs,
        durability=settings.durability,
        metrics_port=broker.metrics_port,
    )
    await stopping.wait()
    say.info("stopping")
    sound = await broker.stop()
    say.info("stopped", clean=sound)
    return 0 if sound else EXIT_FAILED
