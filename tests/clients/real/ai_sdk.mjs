// Vercel's AI SDK (node): OpenAI's chat and Responses, an OpenAI-compatible provider, Anthropic's.
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import * as ai from 'ai'
import { z } from 'zod'

const { QUILL_URL, SCRIPTED_URL } = process.env
const QUESTION = 'What is the weather in Zürich?'
const ANSWER = 'It is 12 °C in Zürich.'

function models(url) {
  const openai = createOpenAI({ baseURL: url + '/v1', apiKey: 'none' })
  return {
    chat: openai.chat('quill'),
    responses: openai.responses('quill'),
    compatible: createOpenAICompatible({
      name: 'quire', baseURL: url + '/v1', supportsStructuredOutputs: true,
    })('quill'),
    anthropic: createAnthropic({ baseURL: url + '/v1', apiKey: 'none' })('quill'),
  }
}

function equal(found, expected, where) {
  if (found !== expected) throw new Error(`${where}: ${JSON.stringify(found)} is not ${JSON.stringify(expected)}`)
}

async function check(claim, run) {
  let error = null
  try {
    await run()
  } catch (caught) {
    error = `${caught.name}: ${caught.message} ${caught.responseBody ?? ''}`.slice(0, 1500)
    process.exitCode = 1
  }
  console.log(JSON.stringify({ check: claim, error }))
}

const weather = ai.tool({
  description: 'The weather in a city.',
  inputSchema: z.object({ city: z.enum(['Bern', 'Zürich']) }),
  execute: async ({ city }) => `12 °C in ${city}`,
})
const options = { maxOutputTokens: 400, temperature: 0, maxRetries: 0 }

await check('a streamed text is the whole one', async () => {
  for (const [name, model] of Object.entries(models(QUILL_URL))) {
    const asked = { model, prompt: 'Tell me a story.', ...options, maxOutputTokens: 16 }
    const whole = await ai.generateText(asked)
    equal(await ai.streamText(asked).text, whole.text, name)
  }
})

await check('a required call of Quill\'s', async () => {
  for (const [name, model] of Object.entries(models(QUILL_URL))) {
    const choice = { type: 'tool', toolName: 'weather' }
    const answer = await ai.generateText({ model, prompt: QUESTION, tools: { weather }, toolChoice: choice, ...options })
    equal(answer.toolCalls[0]?.toolName, 'weather', name)
  }
})

await check('a call, its result, the answer, whole and streamed', async () => {
  for (const [name, model] of Object.entries(models(SCRIPTED_URL))) {
    const asked = {
      model, prompt: QUESTION, tools: { get_weather: weather }, stopWhen: ai.stepCountIs(4), maxOutputTokens: 400,
    }
    equal((await ai.generateText(asked)).text, ANSWER, name)
    const stream = ai.streamText(asked)
    let text = ''
    for await (const part of stream.textStream) text += part
    equal(text, ANSWER, `${name}, streamed`)
  }
})

await check('an object by a schema', async () => {
  for (const [name, model] of Object.entries(models(QUILL_URL))) {
    const schema = z.object({ city: z.enum(['Bern', 'Zürich']) })
    const answer = await ai.generateText({
      model, prompt: 'Where to?', output: ai.Output.object({ schema }), ...options,
    })
    equal(typeof answer.output.city, 'string', name)
  }
})

await check('vectors', async () => {
  const model = createOpenAI({ baseURL: QUILL_URL + '/v1', apiKey: 'none' }).textEmbeddingModel('quill')
  equal((await ai.embedMany({ model, values: ['a', 'b'] })).embeddings.length, 2, 'openai')
})
