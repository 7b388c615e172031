"""Tasks: how a row becomes what a model is asked, and what its answer is worth.

A task of kind `write` asks for text, one of kind `choose` for the likeliest of several answers, and one of kind `read`
how likely a text is.
"""

from __future__ import annotations

import json
import os
import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from offramp.common.errors import OfframpError
from offramp.evaluate import scores
from offramp.evaluate.examples import Example, column, json_rows, merged, sampled
from offramp.evaluate.rouge import KINDS, rouge
from offramp.serve.bench.prompts import read_text

Kind = Literal["write", "choose", "read"]
Scores = Mapping[str, Sequence[float]]
"""Name of a score -> its value for every example; the higher the better."""


@dataclass(frozen=True)
class TaskOptions:
    """What a user may say about a task.

    Attributes:
        data: its file.
        limit: most examples to take; None: all of them.
        seed: draws them; None takes them from the front.
        prompt: `summarisation`: column of what is summarised, or a format string over columns.
        reference: `summarisation`: column of the good answer, or of a list of them.
        shots: `gsm8k`: how many rows, from the front of the file, are solved in the prompt.
    """

    data: Path | None = None
    limit: int | None = None
    seed: int | None = None
    prompt: str = "prompt"
    reference: str = "references"
    shots: int = 4


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        name: what it is called on the command line.
        about: one line about it and the file it needs.
        kind: see above.
        examples: reads them.
        score: what texts are worth; tasks of kind `write` only.
        main: name of the score that stands for the task.
        max_tokens: most tokens of an answer.
        stop: strings that end it.
        needs_data: whether there must be a file.
    """

    name: str
    about: str
    kind: Kind
    examples: Callable[[TaskOptions], Iterator[Example]]
    main: str
    score: Callable[[Sequence[str], Sequence[Example]], Scores] | None = None
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    needs_data: bool = True

    def load(self, options: TaskOptions) -> list[Example]:
        """The examples that are asked, where they ask for text each prompt once.

        Raises:
            OfframpError: there is no file, it cannot be read as what it should be, or it holds nothing.
        """
        if self.needs_data and options.data is None:
            raise OfframpError(f"the task {self.name} needs data: {self.about}; give --data FILE.")
        if not self.needs_data and options.data is not None:
            raise OfframpError(f"the task {self.name} brings its own data; leave --data out.")
        if options.limit is not None and options.limit < 1:
            raise OfframpError(f"limit {options.limit} must be at least 1 example.")
        if options.seed is not None and options.limit is None:
            raise OfframpError(f"seed {options.seed} draws some of the examples; give --limit as well.")
        every = self.examples(options)
        found = merged(every) if self.kind == "write" else list(every)
        if not found:
            raise OfframpError(f"{options.data} holds no example for the task {self.name}; it needs {self.about}.")
        return sampled(found, options.limit, options.seed)


def _summarisation(options: TaskOptions) -> Iterator[Example]:
    from offramp.train.data.sources import SourceConfig, load_rows

    source = SourceConfig("files", str(options.data))
    for row in load_rows(source, _cache()):
        assert isinstance(row, dict)
        good = _value(row, options.reference, source.name)
        references = tuple(map(str, good)) if isinstance(good, list) else (str(good),)
        if not references:
            raise OfframpError(f"the source {source.name} has a row without references; leave it out.")
        yield Example(_fill(options.prompt, row, source.name), references)


def _fill(template: str, row: Mapping[str, Any], where: str) -> str:
    if "{" not in template:
        return str(_value(row, template, where))
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    return string.Formatter().vformat(template, (), {name: _value(row, name, where) for name in names})


def _value(row: Mapping[str, Any], name: str, where: str) -> Any:
    if row.get(name) is None:
        raise OfframpError(f"the source {where} has no {name!r} in a row; its columns are {', '.join(map(repr, row))}.")
    return row[name]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "offramp").expanduser()


def _docstrings(options: TaskOptions) -> Iterator[Example]:
    from offramp.train.data.docstrings import DocstringOptions, load_docstrings

    # Those of benchmarks/recipes, so that models trained there have not seen these packages.
    wanted = DocstringOptions(
        split="test", pairs=True, max_files=4000, max_details=500, max_summary=120, test_share=0.1, seed=2
    )
    rows = load_docstrings(wanted, _cache())
    random.Random(0).shuffle(rows)
    for row in rows:
        yield Example(f"{row['details']}\nSummary:", (row["summary"],))


def _squad(options: TaskOptions) -> Iterator[Example]:
    assert options.data is not None
    fault = OfframpError(f"{options.data} is not in SQuAD's format; it needs {TASKS['qa'].about}.")
    try:
        articles = json.loads(read_text(options.data))["data"]
        for article in articles:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    # SQuAD 2.0 has questions without an answer: saying nothing is right.
                    good = tuple(dict.fromkeys(answer["text"] for answer in question["answers"])) or ("",)
                    prompt = f"{paragraph['context']}\n\nQuestion: {question['question']}\nAnswer:"
                    yield Example(prompt, good)
    except (ValueError, KeyError, TypeError):
        raise fault from None


def _gsm8k(options: TaskOptions) -> Iterator[Example]:
    assert options.data is not None
    shots: list[str] = []
    for where, row in json_rows(options.data):
        question, answer = column(where, row, "question"), column(where, row, "answer")
        if scores.marked_number(answer) is None:
            raise OfframpError(f"{where}, has an answer without a number after ####; mend it.")
        if len(shots) < options.shots:
            shots.append(f"Question: {question}\nAnswer: {answer}\n\n")
            continue
        yield Example("".join(shots) + f"Question: {question}\nAnswer:", (answer,))


def _multiple_choice(options: TaskOptions) -> Iterator[Example]:
    assert options.data is not None
    for where, row in json_rows(options.data):
        choices, answer = row.get("choices"), row.get("answer")
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) for one in choices):
            raise OfframpError(f"{where}, has no list 'choices' of two texts or more; mend it.")
        if isinstance(answer, str):
            answer = choices.index(answer) if answer in choices else None
        if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
            raise OfframpError(f"{where}, has no 'answer' that is one of its choices or the index of one, from 0.")
        prompt = f"Question: {column(where, row, 'question')}\nAnswer:"
        yield Example(prompt, choices=tuple(f" {choice}" for choice in choices), answer=answer)


def _texts(options: TaskOptions) -> Iterator[Example]:
    assert options.data is not None
    if options.data.suffix == ".jsonl":
        yield from (Example(column(where, row, "text")) for where, row in json_rows(options.data))
    elif text := read_text(options.data):
        yield Example(text)


def _rouge(texts: Sequence[str], examples: Sequence[Example]) -> Scores:
    return rouge(texts, [example.references for example in examples], KINDS)


def _qa(texts: Sequence[str], examples: Sequence[Example]) -> Scores:
    pairs = list(zip(texts, examples, strict=True))
    return {
        "exact_match": [scores.exact_match(text, example.references) for text, example in pairs],
        "f1": [scores.token_f1(text, example.references) for text, example in pairs],
    }


def _numbers(texts: Sequence[str], examples: Sequence[Example]) -> Scores:
    wanted = [scores.marked_number(example.references[0]) for example in examples]
    found = {"exact_match": scores.marked_number, "last_number": scores.last_number}
    return {
        name: [scores.number_match(read(text), number) for text, number in zip(texts, wanted, strict=True)]
        for name, read in found.items()
    }


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "summarisation",
            "any file of rows with a prompt and a reference, see --prompt and --reference",
            "write",
            _summarisation,
            "rougeLsum",
            _rouge,
            max_tokens=128,
        ),
        Task(
            "docstrings",
            "summaries of the docstrings of installed packages, without a file",
            "write",
            _docstrings,
            "rougeL",
            _rouge,
            max_tokens=48,
            stop=("\n",),
            needs_data=False,
        ),
        Task(
            "qa",
            "a JSON file in SQuAD's format (data, paragraphs, context, qas, question, answers)",
            "write",
            _squad,
            "f1",
            _qa,
            max_tokens=32,
            stop=("\n",),
        ),
        Task(
            "gsm8k",
            'lines of JSON with a "question" and an "answer" that ends with #### and a number',
            "write",
            _gsm8k,
            "exact_match",
            _numbers,
            max_tokens=256,
            stop=("\nQuestion:",),
        ),
        Task(
            "multiple-choice",
            'lines of JSON with a "question", "choices" and an "answer", one of them or its index',
            "choose",
            _multiple_choice,
            "accuracy",
        ),
        Task(
            "perplexity",
            'a text, or lines of JSON with a "text" each (.jsonl)',
            "read",
            _texts,
            "perplexity",
        ),
    )
}


def task_named(name: str) -> Task:
    """A built-in task.

    Raises:
        OfframpError: there is none of that name.
    """
    try:
        return TASKS[name]
    except KeyError:
        raise OfframpError(f"task {name!r} is unknown; choose one of {', '.join(TASKS)}, or lm-eval:NAME.") from None
