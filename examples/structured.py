"""Answers in a form that programs read: by a JSON schema, and one out of a few words. Any model keeps to it."""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("QUIRE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("QUIRE_KEY", "none"),
)
model = client.models.list().data[0].id
question = {"role": "user", "content": "Who walked into the room?"}
schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

answer = client.chat.completions.create(
    model=model,
    messages=[question],
    max_tokens=200,
    temperature=0,
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
)
person = json.loads(answer.choices[0].message.content)
print(f"{person['name']!r} is {person['age']}")

answer = client.chat.completions.create(
    model=model,
    messages=[question],
    temperature=0,
    extra_body={"structured_outputs": {"choice": ["a man", "a woman", "a ghost"]}},
)
print(f"It was {answer.choices[0].message.content}")
