"""Flights to aircraft as a Spark Declarative Pipeline: `python examples/declarative_pipeline.py`.

The pipeline of `aircraft.py` as definitions (`declarative/aircraft_pipeline.py`): a table that `keyed` fills from the
topic of flights, a flow that writes it to the topic of aircraft exactly once, and a view of the last row of each
aircraft. The topic of flights was resized twice before `spark-pipelines run` reads it. In the end topic and view must
have what one pass over the file finds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset
import pyspark
from stage import BLUE, GREEN, Stage, chart, main

from anabranch.client.sync import Admin, Consumer, Producer
from anabranch.demo.data import expected_results, load_flights
from anabranch.demo.flights import Result

DEFINITIONS = Path(__file__).parent / "declarative" / "aircraft_pipeline.py"
RESIZES = {2: 6, 4: 3}
PARTS = 6
SPECIFICATION = """
name: aircraft
storage: file://{directory}/storage
configuration:
  aircraft.broker: {address}
  spark.sql.python.filterPushdown.enabled: "true"
  spark.sql.shuffle.partitions: "2"
libraries:
  - glob:
      include: aircraft_pipeline.py
"""


def run(stage: Stage, quick: bool, picture: Path) -> bool:
    """Run the pipeline on all flights; return whether every aircraft is right."""
    flights = load_flights(6_000 if quick else None)
    part = -(-flights.num_rows // PARTS)
    with Admin(stage.address) as admin, Producer(stage.address) as producer:
        for topic in ("flights", "aircraft"):
            admin.create_topics(topic, partitions=2)
        for number in range(PARTS):
            if number in RESIZES:
                admin.resize("flights", RESIZES[number])
            producer.send_arrow("flights", flights.slice(number * part, part).select(["key", "value"]))
            producer.flush()
    run_pipeline(stage)
    tables = Path(stage.path("spark-warehouse"))
    view = pyarrow.dataset.dataset(sorted(map(str, tables.rglob("fleet/*.parquet")))).to_table().to_pylist()
    found = {row["tailnum"]: Result(**row["at"]) for row in view}
    in_topic, records = last_in_topic(stage.address)
    expected = expected_results(flights)
    print(f"{flights.num_rows} flights, {len(found)} aircraft in the view, {records} records in the topic")
    draw(found, flights.num_rows, picture)
    return found == in_topic == expected


def run_pipeline(stage: Stage) -> None:
    """Run the definitions with Spark's own command. Raises `RuntimeError` if the run does not complete.

    With a data source in Python the command of PySpark 4.3 fails behind a completed run: Spark sends it the counters of
    Python's workers, which it does not expect (UNKNOWN_RESPONSE). So what counts is the run's last event.
    """
    specification = stage.directory / "spark-pipeline.yml"
    specification.write_text(SPECIFICATION.format(directory=stage.directory, address=stage.address))
    shutil.copy(DEFINITIONS, stage.directory)
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-pipelines"), "run", "--spec", str(specification)]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=stage.directory, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if "Run is COMPLETED" not in said:
        raise RuntimeError(said)


def last_in_topic(address: str) -> tuple[dict[str, Result], int]:
    """Return the last record of each aircraft in the topic, and the number of records."""
    found: dict[str, Result] = {}
    count = 0
    with Consumer(address, auto_offset_reset="earliest", isolation_level="read_committed") as consumer:
        consumer.assign("aircraft")
        while records := consumer.poll(timeout_s=3.0):
            count += len(records)
            found.update({(each.key or b"").decode(): Result(**json.loads(each.value or b"")) for each in records})
    return found, count


def draw(found: dict[str, Result], flights: int, picture: Path) -> None:
    """Draw how many departures aircraft have, and their longest runs of late ones."""
    figure, (left, right) = chart(2, f"A declarative pipeline: {len(found):,} aircraft on {flights:,} flights")
    left.hist([each.legs for each in found.values()], bins=40, color=GREEN, rwidth=0.9)
    left.set(title="Departures", xlabel="departures", ylabel="aircraft")
    runs = [each.longest for each in found.values()]
    right.hist(runs, bins=range(max(runs) + 2), color=BLUE, rwidth=0.9, align="left")
    right.set(title="Longest run of late departures", xlabel="departures more than 15 minutes late", ylabel="aircraft")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    sys.exit(main("declarative_pipeline", run, (__doc__ or "").partition(":")[0], sys.argv[1:]))
