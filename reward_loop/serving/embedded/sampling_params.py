"""The sampling parameters of a request. Names, meanings and ranges are those of vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat

__all__ = ["SamplingOptions", "SamplingParams"]


class SamplingOptions(BaseModel):
    """The parameters that a request and its generation have in common."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """0 decodes greedily."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1 or 0 disables top-k sampling."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Excludes tokens that are less probable than this fraction of the most probable one."""
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Applies to the tokens of prompt and response, before the temperature."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logit of each token that the response contains."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logit of each token, once for each time that the response contains it."""
    # vLLM clamps a bias to the same range.
    logit_bias: dict[int, Annotated[FiniteFloat, AfterValidator(lambda bias: min(100.0, max(-100.0, bias)))]] = {}
    """The value added to the logit of each token id, before the penalties and the temperature."""
    stop_token_ids: tuple[int, ...] = ()
    """End tokens in addition to those of the engine."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Seeds a random stream for the response: the same seed draws the same random numbers in every batch."""


class SamplingParams(SamplingOptions):
    """The sampling parameters of one generation."""

    max_tokens: int = Field(ge=1)
    """The maximum number of new tokens, including the end token."""

    @property
    def distribution(self) -> str:
        """The parameters that all requests of a batch share: all except length and seed."""
        return self.model_dump_json(exclude={"max_tokens", "seed"})
