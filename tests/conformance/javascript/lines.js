// Requests and answers, one JSON object a line: {id, call, ...arguments} in, {id, result} or {id, error} out.
// Bytes travel as base64 text; calls run one after the other.

'use strict'

const readline = require('node:readline')

const bytes = text => (text === null ? null : Buffer.from(text, 'base64'))
const text = buffer => (buffer === null || buffer === undefined ? null : Buffer.from(buffer).toString('base64'))

// BigInts are offsets and timestamps, well below 2^53 in these tests.
const plain = (_, value) => (typeof value === 'bigint' ? Number(value) : value)

// Clients wrap what the broker said; a test wants to know that too.
function told(error) {
  const causes = (error.errors ?? error.groups?.map(group => group.error) ?? [error.cause]).filter(Boolean).map(told)
  return [error.type ?? error.apiId ?? error.code ?? error.name, error.message, ...causes].join(': ')
}

function serve(calls) {
  const answer = message => process.stdout.write(`${JSON.stringify(message, plain)}\n`)
  const perform = async line => {
    const { id, call, ...given } = JSON.parse(line)
    try {
      answer({ id, result: (await calls[call](given)) ?? null })
    } catch (error) {
      answer({ id, error: told(error) })
    }
  }
  let previous = Promise.resolve()
  const lines = readline.createInterface({ input: process.stdin })
  lines.on('line', line => {
    previous = previous.then(() => perform(line))
  })
  lines.on('close', () => previous.then(() => process.exit(0)))
}

module.exports = { bytes, text, told, serve }
