"""OpenAI's library against Quire: models, a chat, and the same chat as a stream."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("QUIRE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("QUIRE_KEY", "none"),
)
model = client.models.list().data[0].id
question = {"role": "user", "content": "Tell me a story."}

answer = client.chat.completions.create(model=model, messages=[question], max_tokens=32, temperature=0)
print(f"{model}: {answer.choices[0].message.content}")

print("streamed: ", end="")
for chunk in client.chat.completions.create(
    model=model, messages=[question], max_tokens=32, temperature=0, stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
