"""Row-wise N:M sparse reinforcement learning: TD3 with all six networks sparse (RNM-TD3, Vrce et
al. 2026, arXiv 2602.14578).

The recipe is ``ste_periodic``: the gradient reaches the kept weights alone, and masks stay for
``interval`` steps. The targets average the dense weights, and what they compute with is that
average, projected anew by the mask of the network that they follow, so they are N:M as well. On
Pendulum-v1 a dense agent reaches about -150 within 10,000 steps. Any task of gymnasium with
continuous actions will do; a file of runs is read by ``nmrun table``, whose ``test/return`` is the
mean of ten episodes without exploration. The paper's own settings are not at hand: the constants
below are our choice.

    pip install '.[rl]'
    python -m examples.rnm_td3 --pattern 2:4 --steps 10000
    python -m examples.rnm_td3 --task HalfCheetah-v5 --pattern 2:4 --steps 1000000 --out runs.csv
    nmrun table runs.csv
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

import nmrun
from nmrun.errors import ConfigError

GAMMA, TAU, BATCH, WARM_UP, POLICY_DELAY = 0.99, 0.005, 128, 1000, 2
EXPLORATION, TARGET_NOISE, NOISE_CLIP = 0.1, 0.2, 0.5  # in units of the largest action
EVALUATED = 10  # episodes without exploration, at the end
COLUMNS = ("dataset", "model", "recipe", "sparsity", "recipe.interval", "trainer.steps", "seed")
MEASURED = ("status", "metric", "test/return", "seconds")


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs)
    )


class Learner:
    """A network, its optimizer, its handle if it is sparse, the average of its dense weights, and
    its target.
    """

    def __init__(self, model: nn.Module, pattern: str | None, interval: int, steps: int) -> None:
        self.model, self.optimizer = model, torch.optim.Adam(model.parameters(), lr=1e-3)
        self.handle = None
        # the last layer stays dense; an input layer that M does not divide does by itself
        if pattern is not None:
            options: dict[str, Any] = {
                "recipe": "ste_periodic",
                "interval": interval,
                "exclude": "4",
            }
            self.handle = nmrun.sparsify(
                model, self.optimizer, pattern=pattern, total_steps=steps, **options
            )
        with self.dense_weights():
            self.average = copy.deepcopy(model).requires_grad_(False)
        self.target = copy.deepcopy(self.average)
        self.project()

    def dense_weights(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.handle is None else self.handle.dense_weights()

    def project(self) -> None:
        """Let the target compute with the average, made N:M."""
        self.target.load_state_dict(self.average.state_dict())
        if self.handle is not None:
            self.handle.finalize(self.target)

    def descend(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def follow(self) -> None:
        with self.dense_weights():
            for averaged, new in zip(
                self.average.parameters(), self.model.parameters(), strict=True
            ):
                averaged.lerp_(new, TAU)
        self.project()


def environment(task: str) -> tuple[Any, float]:
    """A task of gymnasium by its name, with its largest action. Ends the program, with one line,
    where there is none or it is not for this algorithm.
    """
    try:
        env = gymnasium.make(task)
    except (gymnasium.error.Error, ImportError) as error:
        raise SystemExit(f"--task {task}: {str(error).splitlines()[0]}") from None
    for space in (env.action_space, env.observation_space):
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise SystemExit(f"--task {task}: it takes vectors of numbers, and this has {space}")
    return env, float(env.action_space.high[0])  # type: ignore[attr-defined]


def act(model: nn.Module, states: Tensor, largest: float) -> Tensor:
    return largest * torch.tanh(model(states))


def train(
    pattern: str | None, steps: int, seed: int, interval: int, task: str = "Pendulum-v1"
) -> tuple[list[float], list[Learner]]:
    """Returns the return of every episode, and the actor and the two critics. ``pattern`` None
    trains densely.
    """
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    env, largest = environment(task)
    actions = env.action_space.shape[0]
    state, _ = env.reset(seed=seed)
    width = len(state)
    actor = Learner(network(width, actions), pattern, interval, steps)
    critics = [Learner(network(width + actions, 1), pattern, interval, steps) for _ in range(2)]
    memory = torch.empty(steps, 2 * width + actions + 2)
    returns, total = [], 0.0

    for t in range(steps):
        with torch.no_grad():
            action = act(
                actor.model, torch.as_tensor(state, dtype=torch.float32), largest
            ).numpy() + largest * EXPLORATION * random.standard_normal(actions)
        action = (
            random.uniform(-largest, largest, actions)
            if t < WARM_UP
            else action.clip(-largest, largest)
        )
        following, reward, terminated, truncated, _ = env.step(action.astype(np.float32))
        memory[t] = torch.as_tensor(
            np.concatenate([state, action, following, [float(reward), not terminated]]),
            dtype=torch.float32,
        )
        state, total = following, total + float(reward)
        if terminated or truncated:
            returns.append(total)
            (state, _), total = env.reset(), 0.0
        if t < WARM_UP:
            continue

        s, a, s2, r, goes_on = memory[torch.as_tensor(random.integers(0, t + 1, BATCH))].split(
            [width, actions, width, 1, 1], 1
        )
        with torch.no_grad():
            noise = (TARGET_NOISE * torch.randn_like(a)).clamp(-NOISE_CLIP, NOISE_CLIP)
            a2 = (act(actor.target, s2, largest) + largest * noise).clamp(-largest, largest)
            value = r + GAMMA * goes_on * torch.minimum(
                *(critic.target(torch.cat([s2, a2], 1)) for critic in critics)
            )
        for critic in critics:
            critic.descend((critic.model(torch.cat([s, a], 1)) - value).square().mean())
        if t % POLICY_DELAY == 0:
            actor.descend(-critics[0].model(torch.cat([s, act(actor.model, s, largest)], 1)).mean())
            for learner in (actor, *critics):
                learner.follow()
    return returns, [actor, *critics]


@torch.no_grad()
def evaluated(actor: nn.Module, task: str, seed: int) -> float:
    """The mean return of episodes without exploration."""
    env, largest = environment(task)
    total = 0.0
    for episode in range(EVALUATED):
        state, _ = env.reset(seed=None if episode else seed + 100)
        over = False
        while not over:
            action = act(actor, torch.as_tensor(state, dtype=torch.float32), largest).numpy()
            state, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
    return total / EVALUATED


def add(file: Path, run: list[Any]) -> None:
    """Add a run to a file as ``nmrun table`` reads it."""
    new = not file.exists()
    with file.open("a", newline="") as out:
        csv.writer(out).writerows(([[*COLUMNS, *MEASURED]] if new else []) + [run])


def main() -> None:
    parser = argparse.ArgumentParser(description="TD3 with N:M sparse networks.")
    parser.add_argument(
        "--task",
        default="Pendulum-v1",
        help="of gymnasium, such as HalfCheetah-v5 (default Pendulum-v1)",
    )
    parser.add_argument("--pattern", default="2:4", help="N:M, or dense (default 2:4)")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--interval", type=int, default=100, help="optimizer steps that a mask stays (default 100)"
    )
    parser.add_argument("--out", type=Path, help="a CSV file that the run is added to")
    options = parser.parse_args()
    pattern = None if options.pattern == "dense" else options.pattern
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    settings = options.steps, options.seed, options.interval, options.task
    try:
        returns, learners = train(pattern, *settings)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    seconds, last = time.perf_counter() - began, returns[-10:]
    reached = evaluated(learners[0].model, options.task, options.seed)
    print(
        f"{options.pattern}: mean return of the last {len(last)} of {len(returns)} episodes {sum(last) / max(1, len(last)):.0f}"
        f"; of {EVALUATED} without exploration {reached:.0f}"
    )
    if options.out:
        recipe = (
            ("ste_periodic", options.pattern, options.interval)
            if pattern
            else ("dense", "dense", "")
        )
        ran = (options.task, "td3", *recipe, options.steps, options.seed)
        add(options.out, [*ran, "finished", "return", reached, round(seconds, 1)])
    for learner in learners if options.pattern != "dense" else []:
        nmrun.sparsity.check_nm(learner.model, options.pattern, exclude="4")
        nmrun.sparsity.check_nm(learner.target, options.pattern, exclude="4")


if __name__ == "__main__":
    main()
