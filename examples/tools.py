"""A function that the model must call, the function's result, and the answer that follows."""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("QUIRE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("QUIRE_KEY", "none"),
)
model = client.models.list().data[0].id


def get_weather(city: str) -> str:
    """What your program does when the model asks for it."""
    return f"12 °C in {city}"


weather = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Bern", "Zürich"]}},
        "required": ["city"],
    },
}
tools = [{"type": "function", "function": weather}]
messages = [{"role": "user", "content": "How is the weather?"}]

# Naming the function makes it certain that even a small model calls it; "auto" leaves that to the model.
named = {"type": "function", "function": {"name": "get_weather"}}
first = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice=named, max_tokens=400
)
message = first.choices[0].message
messages.append(message)
for call in message.tool_calls:
    arguments = json.loads(call.function.arguments)
    result = get_weather(**arguments)
    print(f"{call.function.name}({arguments['city']!r}) = {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

last = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="none", max_tokens=32, temperature=0
)
print(last.choices[0].message.content)
