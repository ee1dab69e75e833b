"""Do the fast tests notice a wrong line? A sample of mutants of the arbiter and the swap path, by one seed.

    tests/run mutation --mutants 300 --seed 1 --out results.jsonl

Each mutant is one small change (cosmic-ray's operators) in a copy of the checkout, against the tests of its room with `-x`. The file of
results grows by one line for each mutant; the same command continues after an interruption.
"""

import argparse
import collections
import difflib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = "provisioner/fractional_gpu"
ROOMS = {"core": "tests/core", "broker/swap": "tests/broker/swap"}
SLOW = ("adversary", "compute_relief", "fairness", "laws", "simulation", "starting", "starvation", "turns")
"""The arbiter's tests that take longest. They come last, because most mutants are caught before."""
# Left out: `X | None` in annotations, decorators, and names that other operators cover.
FAMILIES = (
    "ReplaceComparisonOperator",
    "ReplaceBinaryOperator_Add",
    "ReplaceBinaryOperator_Sub",
    "ReplaceBinaryOperator_Mul",
    "ReplaceBinaryOperator_Div",
    "ReplaceBinaryOperator_FloorDiv",
    "ReplaceBinaryOperator_Mod",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "AddNot",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "NumberReplacer",
    "ZeroIterationForLoop",
)
CPU_SECONDS = 200  # an endless loop ends; the slowest part of the tests takes about 40
BYTES = 8 * 2**30

Place = tuple[str, tuple[int, int], str]  # file, line and column, family of operators
Mutation = tuple[str, int]  # operator, its occurrence in the file


def places(tree: Path) -> dict[Place, list[Mutation]]:
    """Every place that can be mutated, with the mutations possible there."""
    found: dict[Place, list[Mutation]] = collections.defaultdict(list)
    operators = [name for name in sorted(operator_names()) if name.split("/")[1].startswith(FAMILIES)]
    for room in ROOMS:
        for file in sorted((tree / PRODUCT / room).rglob("*.py")):
            module = get_ast(file.read_text(encoding="utf-8"))
            for name in operators:
                operator, occurrence = get_operator(name)(), 0
                family = next(each for each in FAMILIES if name.split("/")[1].startswith(each))
                for node in ast_nodes(module):
                    for start, _end in operator.mutation_positions(node):
                        found[str(file.relative_to(tree)), start, family].append((name, occurrence))
                        occurrence += 1
    return dict(found)


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))


def try_one(tree: Path, file: str, mutation: Mutation) -> tuple[str, str]:
    """The outcome, "caught", "survived" or "none" (the operator changes nothing here), and the difference."""
    path = tree / file
    before = path.read_text(encoding="utf-8")
    after = mutate_code(before, get_operator(mutation[0])(), mutation[1])
    if after is None or after == before:
        return "none", ""
    room = next(room for room in ROOMS if file.startswith(f"{PRODUCT}/{room}/"))
    slow = [f"tests/core/test_{name}.py" for name in SLOW] if room == "core" else []
    parts = [[ROOMS[room], *(f"--ignore={one}" for one in slow)], *([slow] if slow else [])]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a cache written within one second of the change would hide it
    path.write_text(after, encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "0"]
        survives = all(
            subprocess.run([*command, *part], cwd=tree, env=environment, preexec_fn=limit, capture_output=True, check=False).returncode == 0
            for part in parts
        )  # fmt: skip
    finally:
        path.write_text(before, encoding="utf-8")
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), file, file, lineterm="", n=1)
    return "survived" if survives else "caught", "\n".join(list(lines)[2:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/run mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="a file that grows by one JSON object for each mutant")
    options = parser.parse_args()
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    with tempfile.TemporaryDirectory(prefix="jfg-mutation-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".test-venv", ".git", "node_modules", "__pycache__"))
        found = places(tree)
        rng = random.Random(options.seed)
        sample = [
            (place, rng.choice(found[place])) for place in rng.sample(sorted(found), min(options.mutants, len(found)))
        ]
        for number, ((file, start, _family), mutation) in enumerate(sample[len(done) :], len(done) + 1):
            begun = time.monotonic()
            outcome, difference = try_one(tree, file, mutation)
            row = {"file": file, "line": start[0], "operator": mutation[0], "outcome": outcome, "diff": difference}
            done.append(row)
            with options.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(f"{number}/{len(sample)} {outcome} {file}:{start[0]} {time.monotonic() - begun:.0f} s", flush=True)
    for room in ROOMS:
        counts = collections.Counter(row["outcome"] for row in done if row["file"].startswith(f"{PRODUCT}/{room}/"))
        tried = counts["caught"] + counts["survived"]
        print(f"{room}: {counts['caught']} of {tried} caught ({counts['caught'] / max(1, tried):.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
