"""An agent that answers arithmetic questions with a calculator.

`run` is for the demo model, which cannot write JSON and calls the calculator in words. `solve` is
for a real model: the calculator is a tool in OpenAI's format, and an episode has several turns.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from fakevllm import EpisodeAccess, HfReader, Task, TaskReader, WorkflowOutput

OPERATORS: dict[type[ast.AST], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left / right,
}
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The value of an expression of numbers with + - * / and brackets.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
STATED_SUM = re.compile(r"(\d+) plus (\d+)")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
MAX_EXPRESSION_CHARS = 200
MAX_TURNS = 6
MAX_TOKENS = 1024
"""Maximum length of one answer of a real model, in tokens."""
PROMPT = (
    "Solve the problem step by step. Use the calculator for every calculation. End your last "
    "answer with a line `#### N`, where N is the number asked for."
)


def run(task: Task, access: EpisodeAccess) -> WorkflowOutput:
    """Ask the demo model one question and reward the right number.

    An answer that states a sum, such as `3 plus 4 is 9.`, counts as a call of the calculator for
    this sum. The reward is then for the calculator's result, and not for the model's own number. An
    answer such as `The answer is 9.` is a guess, and the reward is for the model's number.
    """
    with access.openai() as client:
        answer = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": task.main_query}], max_tokens=24
        )
    text = answer.choices[0].message.content or ""
    call = STATED_SUM.search(text)
    number = calculator("+".join(call.groups())) if call else last_number(text)
    reward = float(is_same(number, task.metadata["answer"]))
    return WorkflowOutput(reward=reward, log_metrics={"calculator": float(call is not None)})


async def solve(task: Task, access: EpisodeAccess) -> WorkflowOutput:
    """Let the model call the calculator, and reward the right number in its final answer.

    The final answer is the first one without a tool call. If all MAX_TURNS answers have tool
    calls, the reward is 0.
    """
    messages: list[Any] = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": task.main_query},
    ]
    final_answer, num_calls = "", 0
    async with access.async_openai() as client:
        for _ in range(MAX_TURNS):
            answer = await client.chat.completions.create(
                model="any",
                messages=messages,
                tools=[CALCULATOR],
                max_tokens=MAX_TOKENS,
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            calls = message.tool_calls or []
            if not calls:
                final_answer = message.content or ""
                break
            for call in calls:
                num_calls += 1
                result = call_calculator(call.function.arguments if call.type == "function" else "")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    reward = float(is_same(marked_number(final_answer), task.metadata["answer"]))
    return WorkflowOutput(reward=reward, log_metrics={"calculator": float(num_calls)})


def call_calculator(arguments: str) -> str:
    """Return the tool's result for the JSON arguments of a call.

    If the call is wrong, the result is an error message, so that the model can correct the call.
    """
    try:
        return calculator(str(json.loads(arguments)["expression"]))
    except (ValueError, TypeError, KeyError, SyntaxError, ArithmeticError) as error:
        return f"error: {error}"


def calculator(expression: str) -> str:
    """Return the value of an arithmetic expression.

    Raises ValueError, SyntaxError or ZeroDivisionError for an expression without a value.

    >>> calculator("3+4"), calculator("(1/3 + 2) * 3"), calculator("7/2")
    ('7', '7', '3.5')
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError("too long")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only numbers, + - * / and brackets")


def last_number(text: str) -> str | None:
    """Return the last number in a text, without thousands separators, or None.

    >>> last_number("It is 7."), last_number("#### 1,250"), last_number("well")
    ('7', '1250', None)
    """
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def marked_number(text: str) -> str | None:
    """Return the first number after the last `####` of a text, or None.

    >>> marked_number("70 + 2\\n#### 1,072\\nI used 2 calls."), marked_number("It is 72.")
    ('1072', None)
    """
    _, mark, rest = text.rpartition("####")
    match = NUMBER.search(rest) if mark else None
    return match.group().replace(",", "") if match else None


def is_same(number: str | None, answer: str) -> bool:
    """Return whether a number equals the last number of the reference answer.

    >>> is_same("7.0", "7"), is_same(None, "7"), is_same("1250", "so 5 * 250\\n#### 1,250")
    (True, False, True)
    """
    right = last_number(answer)
    return number is not None and right is not None and Fraction(number) == Fraction(right)


def gsm8k() -> TaskReader:
    """Return a reader of GSM8K's 7473 training problems, which the package `datasets` downloads."""
    return HfReader("openai/gsm8k", name="main", split="train")


def gsm8k_eval() -> list[Task]:
    """Return the first 200 test problems of GSM8K."""
    return list(HfReader("openai/gsm8k", name="main", split="test"))[:200]
