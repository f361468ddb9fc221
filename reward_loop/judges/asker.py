"""`Asker`: what all ready judges share: the models that are asked, and the fields of a row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import pstdev
from typing import Any, Literal

from reward_loop._util.json import MISSING, look_up
from reward_loop._util.text import listing
from reward_loop.client import Judge, Judgement, Verdict, majority, mean, panel
from reward_loop.client.http import shown_url
from reward_loop.errors import ConfigError

_DEFAULTS: Mapping[str, Any] = {"attempts": 3, "max_tokens": 1024}
_COMBINE: dict[str, Callable[[Mapping[str, float]], float]] = {"mean": mean, "majority": majority}


class Asker:
    """Asks one judge, one judge several times, or several judges for a verdict on a response."""

    def __init__(
        self,
        template: str,
        verdict: Verdict,
        fence: Collection[str] = ("answer",),
        *,
        judges: Sequence[str | Mapping[str, Any]] = (),
        votes: int = 1,
        quorum: int | None = None,
        combine: Literal["mean", "majority"] = "mean",
        question: str = "question",
        **options: Any,
    ) -> None:
        """Create the judges. The arguments from `judges` on are those of all ready judges.

        Args:
            template, verdict, fence: see `Judge`.
            judges: several judges: the name of a model, or a mapping with options that replace `options`, such as
                ``{"address": "https://api.openai.com/v1", "model": "gpt-5-mini"}``. A key ``name`` is the judge's name
                in the logs; by default that is the model.
            votes: how often each judge is asked. Above 1, the default ``temperature`` is 1.
            quorum: the smallest number of scores: see `panel`.
            combine: how several scores become one: ``mean`` or ``majority``.
            question: the field of ``extra_info`` with the question, as text or as a list of chat messages; a path such
                as ``prompt.question`` leads into mappings.
            options: options of `Judge`: ``model``, ``address``, ``api_key_env``, ``limit``, ``max_tokens`` (1024) and
                all others. ``attempts`` is 3 by default.

        Raises:
            ConfigError: an option is invalid, or two judges have the same name.
        """
        if votes < 1 or combine not in _COMBINE:
            raise ConfigError(f"votes={votes}, combine={combine!r}: expected 1 or more votes, and {listing(_COMBINE)}")
        # At temperature 0, all votes of a judge would be equal.
        defaults = {**_DEFAULTS, **({"temperature": 1.0} if votes > 1 else {})}
        self._options: dict[str, dict[str, Any]] = {}
        for judge in [judges] if isinstance(judges, str) else judges or [{}]:
            own = {**options, **({"model": judge} if isinstance(judge, str) else judge)}
            name = str(own.pop("name", None) or own.get("model") or shown_url(own.get("address")) or "judge")
            if own.get("max_completion_tokens") is not None:
                own.setdefault("max_tokens", None)  # services accept only one of the two
            for vote in range(1, votes + 1):
                key = name if votes == 1 else f"{name}_{vote}"
                if key in self._options:
                    raise ConfigError(f"judges: two have the name {name!r}: give each another `name`")
                self._options[key] = {"fence": fence, **defaults, **own}
        if quorum is not None and not 1 <= quorum <= len(self._options):
            raise ConfigError(f"quorum={quorum}: it must be from 1 to the number of verdicts, {len(self._options)}")
        self.question = question
        """The field of the question."""
        self._template, self._quorum, self._combine = template, quorum, _COMBINE[combine]
        self._judges = self._reading(verdict)

    async def ask(self, router: str | None, verdict: Verdict | None = None, **fields: Any) -> Judgement:
        """Ask all judges for a verdict on one response.

        Args:
            router: the address for judges without one.
            verdict: another format of the verdict, for this response.
            fields: the values of the placeholders; a template need not have all of them.

        Returns:
            the judgement; of several, the components are the scores by name, and ``disagreement``, their standard
            deviation.

        Raises:
            ConfigError, ServerError, LimitError: see `Judge` and `panel`.
        """
        asked = {
            name: judge(
                None if "address" in self._options[name] else router,
                **{field: fields[field] for field in judge.fields & fields.keys()},
            )
            for name, judge in (self._judges if verdict is None else self._reading(verdict)).items()
        }
        if len(asked) == 1:
            return await next(iter(asked.values()))
        judgement = await panel(asked, quorum=self._quorum, combine=self._combine)
        if scores := judgement.components:
            return replace(judgement, components={**scores, "disagreement": pstdev(scores.values())})
        return judgement

    def _reading(self, verdict: Verdict) -> dict[str, Judge]:
        return {name: Judge(self._template, verdict, **options) for name, options in self._options.items()}


def prompt_of(name: str) -> str:
    """Return the text of a file of ``prompts/``. What most requests share comes first in it, for prefix caching."""
    return (Path(__file__).parent / "prompts" / f"{name}.txt").read_text().rstrip("\n")


def field_of(extra_info: Mapping[str, Any], path: str, argument: str) -> Any:
    """Return a field of the row.

    Raises:
        ValueError: the row has no such field, or it is null; the message names the argument to set.
    """
    value = look_up(extra_info, path)
    if value is MISSING:
        raise ValueError(
            f"the row has no extra_info.{path}, only {listing(map(str, extra_info))}: set the argument {argument!r} of "
            "the judge to the field"
        )
    # A judge would be asked about the text "None".
    if value is None:
        raise ValueError(f"the row has no extra_info.{path}: it is null")
    return value
