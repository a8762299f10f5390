"""Strikes processes of whole runs at random moments; each run must end as if nothing had happened.

Run by hand (`make soak`, an hour or two). Every strike is drawn from (seed, number): how the run is laid
out and scheduled, who gets which signal, in which phase and how far into it; each kind of process comes
up as often. A run that does not end by itself is started again as the documentation says, with --load,
on whole hosts. Then its hash must be that of an undisturbed run (of a free one, that of its replay), and
nothing may be left behind. Each result is written down at once; a second call goes on after the last.
What a bad one left on disk is kept beside the record.
"""

import argparse
import contextlib
import json
import platform
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from onpolicy.outputs.directory import versions
from onpolicy.system import files
from tests.support.footprint import Footprint, told
from tests.support.forked_processes import forked_processes
from tests.support.processes import is_gone
from tests.support.raylets import raylets
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import FREE, ROLLOUTS, TWO_RANKS, run_hash, start_train, write_prompts
from tests.support.victims import OWN_RAY, kill, signal_for, victim_of

PHASES = {"_start": "start", "roll_out": "rollout", "train": "train", "push_weights": "push",
          "save_if_due": "save"}  # fmt: skip
MARKS = f"""
import os
from onpolicy.run.run import Run
def mark(name, phase):
    verb = getattr(Run, name)
    def marked(self, *args):
        text = f"{{phase}} {{self.rollouts_done}}"
        with open(os.environ["SOAK_MARKS"], "a") as marks:
            marks.write(text + "\\n")
        return verb(self, *args)
    setattr(Run, name, marked)
for name, phase in {PHASES!r}.items():
    mark(name, phase)
"""
MAX_STARTS = 4
PATIENCE = 20.0
"""Seconds: torch's manager of shared memory, for one, ends some time after its last client."""

HOST_PATIENCE = 60.0
"""Seconds in which a host of a cluster ends what a run has put there."""

HUNG = 124
"""What stands for the exit code of a run that was ended after LONGEST seconds."""

LONGEST = 400.0

HOSTS = 3
"""Of a run on a cluster; it needs no more than two of them."""

SCHEDULES = {
    "plain": (),
    "lag": ("--rollout-lag", "1", "--global-batch-size", "16"),
    "dynamic": (
        "--dynamic-sampling", "--custom-rm-path", "own_reward.begins_even",
        "--rollout-max-response-len", "60",
    ),
    "free": FREE,
}  # fmt: skip
"""In `free` the clock decides: a replay of its journal says what the hash of such a run is to be."""

AGENT = (
    "--custom-generate-function-path", "own_agent.act_by_tokens", "--agent-workers", "1",
    "--rollout-max-context-len", "240", "--agent-hang-limit", "8",
)  # fmt: skip
"""One episode that fails ends the run, which goes on with --load as if it had not."""


class SoakRecord:
    """A file with a part for each machine and set of versions, which holds every kill under them."""

    def __init__(self, file, seed, here, lora_rank):
        self.file, of_all = file, {"seed": seed, "lora_rank": lora_rank}
        self.soaked = json.loads(file.read_text()) if file.exists() else {**of_all, "parts": []}
        others = {name: self.soaked[name] for name in of_all}
        if others != of_all:
            raise ValueError(f"{file}: has the kills of {others}. Give these, or another file.")
        parts = self.soaked["parts"]
        if not parts or parts[-1]["versions"] != here:
            parts.append({"versions": here, "undisturbed": {}, "kills": []})
        self.part = parts[-1]

    @property
    def kills(self):
        return [kill for part in self.soaked["parts"] for kill in part["kills"]]

    def write(self):
        files.write(self.file, json.dumps(self.soaked, indent=1) + "\n")


class Soak:
    """One record and the runs that it is about."""

    def __init__(self, record, work):
        self.record, self.seed, self.work = record, record.soaked["seed"], work
        self.checkpoint = make_checkpoint(work / "checkpoint")
        self.data = write_prompts(work / "prompts.jsonl")
        lora_rank = record.soaked["lora_rank"]
        self.trained = ("--lora-rank", str(lora_rank)) if lora_rank else ()

    def run(self, number):
        """The strike of this number, with all that follows from it."""
        draw, victim = random.Random(f"{self.seed}/{number}"), victim_of(self.seed, number)
        setting = {
            "hosts": {"node": HOSTS, **dict.fromkeys(OWN_RAY, 1)}.get(victim)
            or draw.choice([1] * 9 + [HOSTS]),
            "ranks": draw.choice([1, 1, 2]),
            "engines": draw.choice([1, 2]),
            "weight_sync": draw.choice(["tensor", "distributed", "disk"]),
            "rank_restarts": draw.choice([0, 1]),
            "schedule": draw.choice(list(SCHEDULES)),
            "agents": victim == "worker" or draw.random() < 0.25,
        }
        is_free = setting["schedule"] == "free"
        undisturbed = self.undisturbed(
            "plain" if is_free else setting["schedule"], setting["agents"]
        )
        phase = draw.choice(list(PHASES.values()))
        plan = {
            "victim": victim,
            "which": draw.randrange(HOSTS),
            "phase": phase,
            # A rollout is saved when it has been counted.
            "rollouts_done": 0
            if phase == "start"
            else draw.randrange(ROLLOUTS) + (phase == "save"),
            "after": round(draw.random() * undisturbed["seconds"][phase], 3),
            "signal": signal_for(victim, draw),
        }
        started = time.monotonic()
        outcome = self.strike(setting, plan)
        outcome["seconds"] = round(time.monotonic() - started)
        found, wanted = outcome.pop("hash"), undisturbed["hash"]
        if is_free and found is not None:
            wanted = self.replayed(setting)
        outcome["hash_is_equal"] = found == wanted
        if is_bad(outcome):
            shutil.copytree(self.work, self.record.file.with_suffix(f".{number}"), symlinks=True)
        self.record.part["kills"].append({"number": number, **setting, **plan, **outcome})
        self.record.write()

    def undisturbed(self, schedule, agents):
        """A run of that kind, of one rank and one engine, that nobody disturbs."""
        known, name = self.record.part["undisturbed"], schedule + ("/agents" if agents else "")
        if name not in known:
            setting = {"ranks": 1, "engines": 1, "schedule": schedule, "agents": agents}
            process, marks = self.start(self.fresh_directory(), setting)
            seconds = dict.fromkeys(PHASES.values(), 0.1)
            current, since = None, 0.0
            while process.poll() is None:
                if (mark := last_mark(marks)) != current:
                    if current:
                        seconds[current[0]] = round(time.monotonic() - since, 3)
                    current, since = mark, time.monotonic()
                time.sleep(0.01)
            output, code = end_of(process)
            assert code == 0, output[-3000:]
            known[name] = {"hash": run_hash(output), "seconds": seconds}
            self.record.write()
        return known[name]

    def strike(self, setting, plan):
        """Start, kill, and start again until the run ends well."""
        directory = self.fresh_directory()
        struck, exit_codes, output, footprints, left = False, [], "", [], set()
        while exit_codes[-1:] not in ([0], [HUNG]) and len(exit_codes) < MAX_STARTS:
            with hosts(setting["hosts"]) as cluster:
                process, marks = self.start(directory, setting, cluster)
                footprints.append(Footprint(process.pid, directory / "t"))
                if not exit_codes:
                    struck = kill_when_due(process, marks, plan, cluster)
                said, code = end_of(process)
                output += said
                exit_codes.append(code)
                left |= left_on(cluster)
            (directory / "output").write_text(output)
        left |= {name for footprint in footprints for name in footprint.left(PATIENCE)}
        return {
            "struck": struck,
            "exit_codes": exit_codes,
            "engine_restarts": len(re.findall(r"starting http\S+ again", output)),
            "hash": run_hash(output) if exit_codes[-1] == 0 else None,
            "left_behind": sorted(left),
        }

    def replayed(self, setting):
        """The hash of the run that repeats the free one that has just ended."""
        journal = self.work / "journal" / "rollouts.jsonl"
        shutil.rmtree(journal.parent, ignore_errors=True)
        shutil.copytree(self.work / "run" / "run", journal.parent)
        setting = {**setting, "ranks": 1, "engines": 1, "replay": ("--replay", str(journal))}
        directory = self.fresh_directory()
        output, code = end_of(self.start(directory, setting)[0])
        (directory / "output").write_text(output)
        return run_hash(output) if code == 0 else None

    def start(self, directory, setting, cluster=None):
        marks = directory / "marks"
        marks.touch()
        (directory / "t").mkdir(exist_ok=True)
        save, ranks = str(directory / "save"), str(setting["ranks"])
        spread = TWO_RANKS if ranks == "2" else ()
        if cluster:
            spread = ("--ray-address", cluster.address, "--actor-num-nodes", ranks)
        process = start_train(
            self.checkpoint, self.data, directory,
            "--rollout-num-engines", str(setting["engines"]), "--cpu-threads", "1",
            "--weight-sync", setting.get("weight_sync", "tensor"),
            "--max-rank-restarts", str(setting.get("rank_restarts", 0)),
            "--rollout-health-timeout", "20", "--rank-timeout", "40", "--rm-time-limit", "2",
            "--rollout-start-timeout", "150",
            "--save", save, "--save-interval", "1", "--load", save,
            *SCHEDULES[setting["schedule"]], *(AGENT if setting["agents"] else ()),
            *setting.get("replay", ()),
            *spread, *self.trained, preamble=MARKS,
            env={"TMPDIR": str(directory / "t"), "SOAK_MARKS": str(marks)},
        )  # fmt: skip
        return process, marks

    def fresh_directory(self):
        directory = self.work / "run"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        return directory


def is_bad(kill):
    return not kill["hash_is_equal"] or bool(kill["left_behind"])


def end_of(process):
    """What a run has said, and its exit code."""
    try:
        return process.communicate(timeout=LONGEST)[0], process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0], HUNG


def hosts(count):
    """A cluster of so many hosts; None for one, on which a run starts a Ray of its own."""
    return raylets(count) if count > 1 else contextlib.nullcontext()


def left_on(cluster):
    """Names of the processes that a run that has ended leaves on the hosts of a cluster."""
    if cluster is None:
        return set()
    there, deadline = cluster.processes(), time.monotonic() + HOST_PATIENCE
    while (left := [p for p in there if not is_gone(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return set(filter(None, map(told, left)))


def kill_when_due(process, marks, plan, cluster):
    """Kill the planned process at the planned moment, or as soon as there is one; whether there was."""
    due = (plan["phase"], plan["rollouts_done"])
    while process.poll() is None and due not in marks_of(marks):
        time.sleep(0.005)
    time.sleep(plan["after"])
    while process.poll() is None:
        if kill(plan["victim"], plan["which"], process.pid, cluster, plan["signal"]):
            return True
        time.sleep(0.02)
    return False


def marks_of(file):
    """(phase, rollouts done) of each phase that a run has come to."""
    pairs = (line.split() for line in file.read_text().splitlines())
    return [(phase, int(done)) for phase, done in pairs]


def last_mark(file):
    return next(reversed(marks_of(file)), None)


def processor():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(": ")[1] for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def describe(kill):
    struck = "struck" if kill["struck"] else "NOT FOUND"
    schedule = kill.get("schedule", "plain") + (" with agents" if kill.get("agents") else "")
    return (
        f"{kill['victim']} {struck} ({kill.get('signal', 'KILL')}) {kill['after']:.2f} s into "
        f"{kill['phase']} after "
        f"{kill['rollouts_done']} rollouts; {kill['hosts']} hosts, {kill['ranks']} ranks, "
        f"{kill['engines']} engines, {kill['weight_sync']}, {schedule}: "
        f"exit codes {kill['exit_codes']}, hash "
        f"equal: {kill['hash_is_equal']}, left behind: {kill['left_behind'] or 'nothing'} "
        f"({kill['seconds']} s)"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="the record")
    parser.add_argument(
        "--kills", type=int, default=40, help="strikes in all, earlier ones included"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lora-rank", type=int, default=0, help="of every run; 0: all weights")
    parser.add_argument("--forked", action="store_true", help="save imports: fork what Python runs")
    arguments = parser.parse_args()
    here = {**versions(), "processor": processor()}
    record = SoakRecord(arguments.json, arguments.seed, here, arguments.lora_rank)
    forked = forked_processes(arguments.forked)
    with tempfile.TemporaryDirectory(prefix="soak-") as work, forked:
        soak = Soak(record, Path(work))
        for number in range(len(record.kills), arguments.kills):
            soak.run(number)
            print(f"{number + 1}/{arguments.kills}: {describe(record.kills[-1])}", flush=True)
    bad = [*filter(is_bad, record.kills)]
    struck = Counter(k["victim"] for k in record.kills if k["struck"])
    print(f"{len(record.kills)} kills, {struck.total()} struck ({dict(struck)}), {len(bad)} bad")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
