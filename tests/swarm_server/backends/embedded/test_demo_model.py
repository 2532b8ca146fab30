from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_server.backends.embedded.engine_helpers import ask, collect
from swarm_server.backends.embedded.learning_curve import success
from transformers import AutoTokenizer

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.embedded.demo_model.sums import Sum, prompt_text, random_sum
from fakevllm_server.backends.embedded.engine import EmbeddedEngine
from fakevllm_server.types.sampling import Sampling

TOKENIZER: Any = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)

    assert (
        TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
    )


def test_the_demo_models_folder_is_known_without_torch() -> None:
    script = (
        "import sys; from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR;"
        "import fakevllm_server.backends.embedded.demo_model.sums;"
        "assert (DEMO_MODEL_DIR / 'config.json').is_file();"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )

    path = str(Path(__file__).parents[4] / "server")
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": path}, timeout=30)


@pytest.mark.parametrize("system", [None, "You are a helpful assistant."])
def test_the_demo_model_was_warmed_up_on_the_templates_prompts(
    demo_engine: EmbeddedEngine, system: str | None
) -> None:
    request = ask("What is 1 plus 2?")
    if system:
        request.messages.insert(0, {"role": "system", "content": system})

    assert TOKENIZER.decode(demo_engine.render(request)) == prompt_text("What is 1 plus 2?", system)


async def test_the_demo_model_knows_the_sums_but_samples_them_badly(
    demo_engine: EmbeddedEngine,
) -> None:
    sampled = await success(demo_engine, 600, Sampling(max_tokens=24, seed=None))
    greedy = await success(demo_engine, 200, Sampling(max_tokens=24, temperature=0))

    assert 0.33 < sampled < 0.55
    assert greedy > 0.9


async def test_the_demo_model_answers_any_text_briefly_and_in_several_forms(
    demo_engine: EmbeddedEngine,
) -> None:
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz    ,.'0123456789"
    replies: list[str] = []
    for index in range(60):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(20, 250)))
        tokens = await collect(
            demo_engine.generate(
                demo_engine.render(ask(text + "?")), Sampling(max_tokens=64, seed=index)
            )
        )
        assert len(tokens) <= 24 and tokens[-1].id in demo_engine.eos_ids
        replies.append(demo_engine.decode([token.id for token in tokens]))

    starts = [reply.split(" ")[0] for reply in replies]
    assert starts.count("The") > 5 and starts.count("It") > 5


@pytest.mark.parametrize(
    ("reply", "solved"),
    [
        ("The answer is 7.", True),
        ("It is 7", True),
        ("3 plus 4 is 7.", True),
        ("It is 17.", False),
        ("It is 7 or 8.", False),
        ("seven", False),
        ("", False),
    ],
)
def test_a_reply_solves_a_sum_when_it_ends_in_the_right_number(reply: str, solved: bool) -> None:
    assert Sum(3, 4).is_solved_by(reply) == solved


def test_the_right_replies_solve_and_the_wrong_ones_do_not() -> None:
    rng = random.Random(0)
    for _ in range(50):
        one = random_sum(rng)
        assert all(one.is_solved_by(reply) for reply in one.replies(one.answer))
        assert not any(one.is_solved_by(reply) for reply in one.replies(one.answer + 1))
