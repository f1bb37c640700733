"""Anthropic's library against Quire: counting tokens, a message, and the same message as a stream."""

import os

from anthropic import Anthropic

client = Anthropic(
    base_url=os.environ.get("QUIRE_URL", "http://127.0.0.1:8000"),
    api_key=os.environ.get("QUIRE_KEY", "none"),
)
model = client.models.list().data[0].id
fields = {"max_tokens": 32, "extra_body": {"seed": 7}}  # the same seed gives the same text
question = {"role": "user", "content": "Tell me a story."}

count = client.messages.count_tokens(model=model, messages=[question])
message = client.messages.create(model=model, messages=[question], **fields)
print(f"{count.input_tokens} tokens in, {message.usage.output_tokens} out: {message.content[0].text}")

print("streamed: ", end="")
with client.messages.stream(model=model, messages=[question], **fields) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
