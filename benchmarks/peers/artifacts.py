"""Jars that peers and the Java client need, fetched once by coordinate and checked by hash.

A lock file has one line per jar: `group:artifact:version sha256`. Apache Ivy, which PySpark brings, fetches what is
missing from its default repository into `.tools/`; nothing is used whose hash differs from the lock.
To write a lock anew, with everything its coordinates depend on:

    python -m benchmarks.peers.artifacts benchmarks/peers/kafka.lock org.apache.kafka:kafka_2.13:4.3.1 ...
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

TOOLS = Path(__file__).resolve().parents[2] / ".tools"
KAFKA_LOCK = Path(__file__).with_name("kafka.lock")
FETCH_TIMEOUT_S = 600
SETTINGS = """<ivysettings>
  <settings defaultResolver="public"/>
  <caches defaultCacheDir={cache}/>
  <resolvers><ibiblio name="public" m2compatible="true" usepoms="{follow}" useMavenMetadata="false"/></resolvers>
</ivysettings>"""


class ArtifactError(RuntimeError):
    """A jar could not be fetched, or is not the one that was locked."""


@dataclass(frozen=True, slots=True, order=True)
class Artifact:
    """A jar by its coordinate, and the hash it must have."""

    group: str
    name: str
    version: str
    sha256: str = ""

    @property
    def coordinate(self) -> str:
        return f"{self.group}:{self.name}:{self.version}"

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.version}.jar"


def read_lock(path: Path) -> tuple[Artifact, ...]:
    """Read a lock file; empty lines and lines that start with # are skipped."""
    artifacts = []
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            coordinate, sha256 = line.split()
            group, name, version = coordinate.split(":")
            artifacts.append(Artifact(group, name, version, sha256))
    return tuple(artifacts)


def fetch(lock: Path, *, only: Sequence[str] | None = None) -> list[Path]:
    """Return the locked jars (those whose artifact name is in `only`, when given), fetching what is not there yet."""
    wanted = [artifact for artifact in read_lock(lock) if only is None or artifact.name in only]
    directory = TOOLS / lock.stem
    with _one_at_a_time(directory):
        missing = [artifact for artifact in wanted if not (directory / artifact.file_name).exists()]
        if missing:
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                retrieved = _retrieve(missing, Path(scratch), follow=False)
                for artifact in missing:
                    _check(retrieved, artifact)
                for artifact in missing:
                    (retrieved / artifact.file_name).rename(directory / artifact.file_name)
    return [directory / artifact.file_name for artifact in wanted]


def write_lock(lock: Path, roots: Sequence[Artifact], *, without: Sequence[str] = ()) -> None:
    """Resolve the roots with everything they need at run time, except artifacts named in `without`."""
    with tempfile.TemporaryDirectory() as scratch:
        retrieved = _retrieve(roots, Path(scratch), follow=True, without=without)
        found = []
        for path in retrieved.glob("*.jar"):
            group, name, version = path.stem.split("@")
            found.append(Artifact(group, name, version, _sha256(path)))
    lines = [f"{artifact.coordinate} {artifact.sha256}\n" for artifact in sorted(found)]
    lock.write_text("# group:artifact:version sha256, written by benchmarks.peers.artifacts\n" + "".join(lines))


def _check(directory: Path, artifact: Artifact) -> None:
    path = directory / artifact.file_name
    if not path.exists():
        raise ArtifactError(f"{artifact.coordinate} was not found in the repository of Java packages")
    actual = _sha256(path)
    if actual != artifact.sha256:
        raise ArtifactError(
            f"{artifact.coordinate} has SHA-256 {actual}, but {artifact.sha256} is locked; if the lock is right, "
            "what was served is not the release"
        )


def _retrieve(artifacts: Sequence[Artifact], scratch: Path, *, follow: bool, without: Sequence[str] = ()) -> Path:
    """Let Ivy bring the artifacts to a directory; with `follow` also what they depend on, named group@name@version."""
    conf = "default->runtime,master" if follow else "default->default"
    dependencies = "".join(
        f"<dependency org={quoteattr(a.group)} name={quoteattr(a.name)} rev={quoteattr(a.version)} "
        f'transitive="{str(follow).lower()}" conf={quoteattr(conf)}/>'
        for a in artifacts
    )
    excluded = "".join(f"<exclude module={quoteattr(name)}/>" for name in without)
    module = scratch / "module.xml"
    module.write_text(
        '<ivy-module version="2.0"><info organisation="anabranch" module="peers"/>'
        f'<configurations><conf name="default"/></configurations><dependencies>{dependencies}{excluded}</dependencies>'
        "</ivy-module>"
    )
    settings = scratch / "settings.xml"
    settings.write_text(SETTINGS.format(cache=quoteattr(str(scratch / "cache")), follow=str(follow).lower()))
    pattern = "[organisation]@[module]@[revision].[ext]" if follow else "[artifact]-[revision].[ext]"
    command = [java(), f"-Divy.default.ivy.user.dir={scratch}", "-jar", str(_ivy()), "-settings", str(settings)]
    command += ["-ivy", str(module), "-confs", "default", "-retrieve", str(scratch / "jars" / pattern)]
    for attempt in (1, 2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
        if done.returncode == 0 and "UNRESOLVED" not in done.stdout:
            return scratch / "jars"
        if attempt == 2:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            names = ", ".join(a.coordinate for a in artifacts[:3])
            raise ArtifactError(f"Ivy could not fetch {names} and {max(0, len(artifacts) - 3)} others:\n{tail}")
    raise AssertionError("unreachable")


def java() -> str:
    """Return the path of the `java` command, or say how to get one."""
    found = shutil.which("java")
    if found is None:
        raise ArtifactError("Java 17 or newer is needed: for example apt-get install openjdk-17-jre-headless")
    return found


def _ivy() -> Path:
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ArtifactError("PySpark is not installed; it brings Apache Ivy, which fetches the jars")
    return next(Path(spec.origin).with_name("jars").glob("ivy-*.jar"))


def pyspark_jar(name: str) -> Path:
    """Return a jar that PySpark ships, by its artifact name (`py4j`)."""
    return next(_ivy().parent.glob(f"{name}-[0-9]*.jar"))


@contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Keep test workers that start together from fetching the same files twice."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def main(arguments: Sequence[str]) -> int:
    """Write a lock: PATH COORDINATE... [-ARTIFACT_TO_LEAVE_OUT...]."""
    path, *rest = arguments
    roots = [Artifact(*coordinate.split(":")) for coordinate in rest if not coordinate.startswith("-")]
    write_lock(Path(path), roots, without=[name[1:] for name in rest if name.startswith("-")])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
