"""The examples of OpenAI's routes: bodies, and what the service with the embedded model answered to them."""

from app.api.examples import Example, named

MODELS: dict[str, Example] = {}
MODEL: dict[str, Example] = {}
COMPLETION_ANSWERS: dict[str, Example] = {}
CHAT_ANSWERS: dict[str, Example] = {}
COMPLETION_EVENTS: dict[str, Example] = {}
CHAT_EVENTS: dict[str, Example] = {}

COMPLETION_BODIES = named(
    text=("A text, as it is.", {"prompt": "The three primary colors are", "max_tokens": 12, "temperature": 0}),
    texts=(
        "Two texts, of which each is a request of its own.",
        {"prompt": ["The capital of France is", "The capital of Italy is"], "max_tokens": 4, "temperature": 0},
    ),
    scored=(
        "The logprobs of a given text.",
        {"prompt": "Water boils at 100 degrees", "echo": True, "max_tokens": 0, "logprobs": 1},
    ),
)

CHAT_BODIES = named(
    question=(
        "A conversation; the model's chat template makes it text.",
        {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0},
    ),
    schema=(
        "An answer that satisfies a JSON schema.",
        {
            "messages": [{"role": "user", "content": "Name a city and its country."}],
            "temperature": 0,
            "max_completion_tokens": 64,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "city",
                    "schema": {
                        "type": "object",
                        "properties": {
                            "city": {"type": "string", "maxLength": 20},
                            "country": {"type": "string", "maxLength": 20},
                        },
                        "required": ["city", "country"],
                        "additionalProperties": False,
                    },
                },
            },
        },
    ),
)
