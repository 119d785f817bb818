// Members that are KafkaJS's consumers.

'use strict'

const { Kafka, logLevel, PartitionAssigners } = require('kafkajs')
const { host, pairs } = require('./members.js')

const address = process.argv[2]

host(async (asked, report) => {
  const kafka = new Kafka({ clientId: 'kafkajs', brokers: [address], logLevel: logLevel.NOTHING })
  const consumer = kafka.consumer({
    groupId: asked.group,
    sessionTimeout: asked.session_timeout_ms,
    rebalanceTimeout: 10000,
    heartbeatInterval: 100,
    metadataMaxAge: 300,
    maxWaitTimeInMs: 100,
    partitionAssigners: [PartitionAssigners.roundRobin],
    retry: { initialRetryTime: 50, retries: 20 },
  })
  const joined = ({ memberAssignment }) =>
    pairs(Object.entries(memberAssignment).map(([topic, partitions]) => ({ topic, partitions })))
  consumer.on(consumer.events.GROUP_JOIN, ({ payload }) => report.owns(joined(payload)))
  consumer.on(consumer.events.REBALANCING, () => report.owns([]))
  consumer.on(consumer.events.CRASH, ({ payload }) => {
    report.owns([])
    report.refused(payload.error)
  })
  await consumer.connect()
  const topics = asked.pattern ? [new RegExp(`^${asked.pattern}$`)] : asked.topics
  await consumer.subscribe({ topics, fromBeginning: asked.reset === 'earliest' })
  await consumer.run({
    autoCommit: false,
    eachBatch: async ({ batch: { topic, partition, messages } }) => {
      report.records(messages.map(({ offset, value }) => [topic, partition, Number(offset), value.toString()]))
      const offset = Number(messages.at(-1).offset) + 1
      report.committing([[topic, partition, offset]])
      try {
        await consumer.commitOffsets([{ topic, partition, offset: String(offset) }])
        report.committed([[topic, partition, offset]])
      } catch (error) {
        report.refused(error)
      }
    },
  })
  return { leave: () => consumer.disconnect() }
})
