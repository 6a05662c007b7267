"""What a prompt must keep to before an engine sees it."""

from app.errors import ContextLengthExceeded, InvalidRequest


def check_context(prompt_tokens: int, max_model_len: int, *, at_least: bool = False) -> None:
    """The prompt must leave room for one token.

    Args:
        prompt_tokens: length of the prompt in tokens.
        max_model_len: context length in tokens.
        at_least: the prompt was too long to count; ``prompt_tokens`` is a lower bound.

    Raises:
        ContextLengthExceeded: it does not.
    """
    if prompt_tokens < max_model_len:
        return
    has = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
    raise ContextLengthExceeded(
        f"the prompt has {has} tokens; this model's context is {max_model_len} and one token must be left to generate",
        param=None,
        prompt_tokens=prompt_tokens,
        limit=max_model_len,
    )


def check_token_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Every id must be an integer of the vocabulary, 0 to ``vocab_size`` − 1.

    Raises:
        InvalidRequest: names the first one that is not.
    """
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise _wrong_token(token, vocab_size, f"{param}.{position}")


def check_bias(bias: dict[int, float], vocab_size: int) -> None:
    """The same for the token ids of ``logit_bias``.

    Raises:
        InvalidRequest: names the first one that is not.
    """
    for token in bias:
        if not 0 <= token < vocab_size:
            raise _wrong_token(token, vocab_size, f"logit_bias.{token}")


def _wrong_token(token: object, vocab_size: int, param: str) -> InvalidRequest:
    if type(token) is not int:
        return InvalidRequest(f"{token!r} is not a token id: an integer", param=param)
    return InvalidRequest(f"token id {_short(token)} is outside the vocabulary of {vocab_size} tokens", param=param)


def _short(number: int) -> str:
    """An integer for a message; one of thousands of digits cannot be printed."""
    return str(number) if abs(number) < 10**30 else "of more than 30 digits"


def keep_last(ids: list[int], count: int | None) -> list[int]:
    """The last ``count`` ids; all of them when it is None."""
    return ids if count is None else ids[-count:]


def one_bos(ids: list[int], bos_token_id: int | None) -> list[int]:
    """Drop a repeated beginning-of-sequence at the front, as a template and a tokenizer write it together."""
    start = 0
    while bos_token_id is not None and ids[start : start + 2] == [bos_token_id, bos_token_id]:
        start += 1
    return ids[start:]
