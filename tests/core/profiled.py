"""A request's profile alone, for tests that look at no chain."""

from __future__ import annotations

from collections.abc import Sequence

from profiles.features import BodyFields, OutputLengths, RequestContext, profile_and_chain
from subjects.messages import Endpoint, ModelRecord, RequestProfile


def build_profile(
    record: ModelRecord,
    endpoint: Endpoint,
    fields: BodyFields,
    prompts: Sequence[Sequence[int]],
    context: RequestContext,
    lengths: OutputLengths,
) -> RequestProfile:
    return profile_and_chain(record, endpoint, fields, prompts, context, lengths)[0]
