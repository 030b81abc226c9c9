"""`odc-mpi simulate`: what each schedule would make of a scenario, for people or as one JSON object. Local; no MPI."""

import json
from collections.abc import Mapping
from dataclasses import replace

from odc_mpi.simulate.paper import PAPER, nearest
from odc_mpi.simulate.scenario import Scenario
from odc_mpi.simulate.simulate import FLOOR, SCHEDULES, Outcome, simulate

#: Sequences per rank that the advice compares.
PER_RANK = (1, 2, 4, 8, 16)
#: The advice draws at most so many sequences for each: a few seconds for all.
ADVICE_SEQUENCES = 20_000
#: What the advice is about.
ADVISED = "window/dynamic"


def run(scenario: Scenario, as_json: bool) -> None:
    """Simulate a scenario and print what came of it. Local.

    Args:
        scenario: What is tried.
        as_json: Print one object, which has the figures of `Outcome`, and no advice.

    Raises:
        UserError: Its lengths are not to be had.
    """
    outcome = simulate(scenario)
    print(
        json.dumps({"benchmark": "simulate", **outcome.as_json()})
        if as_json
        else f"{report(outcome)}\n\n{advice(scenario)}"
    )


def report(outcome: Outcome, beside: Mapping[str, Mapping[str, float]] | None = None) -> str:
    """Return the figures as a table with a heading, and a sentence on what sets the floor. Local.

    Args:
        outcome: The figures.
        beside: Speed-ups from elsewhere to put beside them, by a heading of at most nine letters.
    """
    scenario = outcome.scenario
    paper = PAPER.get((scenario.lengths, scenario.ranks, scenario.per_rank), {})
    others = {**(beside or {}), **({"paper": paper} if paper else {})}
    lines = [
        f"{scenario.ranks} ranks, {scenario.per_rank} sequences each, lengths {scenario.lengths} of up to "
        f"{scenario.source.max_tokens:,} tokens",
        f"microbatches of up to {scenario.max_tokens:,} tokens, speeds vary by {scenario.speed_variation:.0%}, "
        f"costs err by {scenario.cost_error:.0%}",
        f"{scenario.num_minibatches} minibatches, seed {scenario.seed}",
        "",
        f"{'':24}{'speed-up':>9}{'idle':>8}{'s / step':>10}" + "".join(f"{title:>11}" for title in others),
    ]
    for name in (*SCHEDULES, FLOOR):
        line = f"{name:24}{outcome.speedup[name]:9.3f}{outcome.idle_fraction[name]:8.1%}{outcome.step_s[name]:10.2f}"
        line += "".join(f"{other[name]:11.2f}" if name in other else 11 * " " for other in others.values())
        lines.append(line.rstrip())
    return "\n".join([*lines, "", _floor(outcome), *_elsewhere(scenario, paper)])


def _elsewhere(scenario: Scenario, paper: Mapping[str, float]) -> list[str]:
    """Say what the paper has for another scenario, if it has it for none like this one."""
    other = None if paper else nearest(scenario)
    if other is None:
        return []
    figures = ", ".join(f"{name} {value:.2f}" for name, value in other["speedup"].items())
    return [f"The paper has, for {other['ranks']} ranks with {other['per_rank']} sequences each: {figures}."]


def _floor(outcome: Outcome) -> str:
    share = outcome.longest_rules
    if share == 0:
        return "The floor is all work shared out evenly; no single sequence takes longer than that."
    others = "" if share == 1 else ", all work shared out evenly in the others"
    return f"The floor is the longest sequence alone in {share:.0%} of the minibatches{others}."


def advice(scenario: Scenario) -> str:
    """Return what other numbers of sequences per rank would bring, and a sentence on it. Local."""
    outcomes = {}
    for per_rank in PER_RANK:
        most = max(1, ADVICE_SEQUENCES // (scenario.ranks * per_rank))
        outcomes[per_rank] = simulate(
            replace(scenario, per_rank=per_rank, num_minibatches=min(most, scenario.num_minibatches))
        )
    lines = [f"{'sequences':>12}{'speed-up':>12}{'':10}{'idle':>12}{'sequences':>14}"]
    lines.append(f"{'per rank':>12}{'lb_mini':>12}{'dynamic':>10}{'dynamic':>12}{'per s':>14}")
    rates = {}
    for per_rank, outcome in outcomes.items():
        rates[per_rank] = scenario.ranks * per_rank / outcome.step_s[ADVISED]
        lines.append(
            f"{per_rank:12}{outcome.speedup['window/lb_mini']:12.3f}{outcome.speedup[ADVISED]:10.3f}"
            f"{outcome.idle_fraction[ADVISED]:12.1%}{rates[per_rank]:14.2f}"
        )
    return "\n".join([*lines, "", _sentence(rates)])


def _sentence(rates: Mapping[int, float]) -> str:
    """Name the smallest number of sequences per rank that comes within 2 % of the best, and what it brings."""
    enough = next(per_rank for per_rank, rate in rates.items() if rate >= 0.98 * max(rates.values()))
    gain = rates[enough] / rates[PER_RANK[0]] - 1
    rest = max(rates.values()) / rates[enough] - 1
    return (
        f"With {ADVISED}, {enough} per rank are enough: {gain:.0%} more sequences per second than with {PER_RANK[0]};\n"
        f"more of them bring at most {rest:.1%} on top."
    )
