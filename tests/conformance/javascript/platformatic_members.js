// Members that are @platformatic/kafka's consumers.

'use strict'

const { pathToFileURL } = require('node:url')
const { host, pairs } = require('./members.js')

const address = process.argv[2]
const library = import(pathToFileURL(require.resolve('@platformatic/kafka')))

host(async (asked, report) => {
  const { Consumer } = await library
  const consumer = new Consumer({
    clientId: 'platformatic',
    bootstrapBrokers: [address],
    groupId: asked.group,
    groupProtocol: asked.protocol,
    ...(asked.instance ? { groupInstanceId: asked.instance } : {}),
    ...(asked.protocol === 'consumer' && asked.assignor ? { groupRemoteAssignor: asked.assignor } : {}),
    sessionTimeout: asked.session_timeout_ms,
    rebalanceTimeout: Math.max(10000, asked.session_timeout_ms),
    heartbeatInterval: 100,
    maxWaitTime: 100,
    metadataMaxAge: 300,
    retries: 10,
    retryDelay: 50,
    autocommit: false,
  })
  // What it owns is a property that it sets anew, and only then acknowledges.
  let assignments = null
  Object.defineProperty(consumer, 'assignments', {
    get: () => assignments,
    set: value => {
      assignments = value
      report.owns(pairs(value ?? []))
    },
  })
  consumer.on('consumer:group:rebalance', () => report.owns([]))
  const stream = await consumer.consume({
    topics: asked.topics,
    mode: 'committed',
    fallbackMode: asked.reset,
    autocommit: false,
  })
  stream.on('error', error => report.failed(error))
  let waiting = []
  let committing = Promise.resolve()
  let uncommitted = new Map()
  const take = async () => {
    const messages = waiting
    waiting = []
    if (messages.length) {
      const row = ({ topic, partition, offset, value }) => [topic, partition, Number(offset), value.toString()]
      report.records(messages.map(row))
    }
    for (const { topic, partition, offset } of messages) {
      uncommitted.set(`${topic} ${partition}`, { topic, partition, offset: offset + 1n, leaderEpoch: -1 })
    }
    const owned = new Set(pairs(assignments ?? []).map(pair => pair.join(' ')))
    const offsets = [...uncommitted].filter(([at]) => owned.has(at)).map(([, each]) => each)
    uncommitted = new Map()
    if (!offsets.length) return
    const ends = offsets.map(({ topic, partition, offset }) => [topic, partition, Number(offset)])
    report.committing(ends)
    try {
      await consumer.commit({ offsets })
      report.committed(ends)
    } catch (error) {
      report.refused(error, true)
      for (const each of offsets) uncommitted.set(`${each.topic} ${each.partition}`, each)
      setTimeout(() => (committing = committing.then(take)), 100)
    }
  }
  stream.on('data', message => {
    if (waiting.push(message) === 1) setImmediate(() => (committing = committing.then(take)))
  })
  return {
    leave: async () => {
      await stream.close()
      await committing
      await consumer.close(true)
    },
  }
})
