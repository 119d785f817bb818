// @platformatic/kafka as a peer: its producer, its consumer's fetch by node and topic id, its admin.

'use strict'

const { pathToFileURL } = require('node:url')
const { bytes, serve, text } = require('./lines.js')

const TOPIC = 2 // the resource type
const SET = 0 // the operation on a config
const address = process.argv[2]
const clients = (async () => {
  const { Admin, Consumer, Producer } = await import(pathToFileURL(require.resolve('@platformatic/kafka')))
  const common = { clientId: 'platformatic', bootstrapBrokers: [address], retries: 3, autocreateTopics: false }
  return {
    admin: new Admin(common),
    consumer: new Consumer({ ...common, groupId: 'unused' }),
    producers: { true: new Producer({ ...common, idempotent: true }), false: new Producer(common) },
  }
})()

async function listed(topic, timestamp) {
  const { consumer } = await clients
  const { topics } = await consumer.metadata({ topics: [topic], forceUpdate: true })
  const partitions = topics.get(topic).partitions.map((_, index) => index)
  const found = await consumer.listOffsets({ topics: [topic], partitions: { [topic]: partitions }, timestamp })
  return found.get(topic).map((offset, partition) => [partition, offset])
}

serve({
  async produce({ topic, partition, records, compression, idempotent }) {
    const { producers } = await clients
    await producers[idempotent].metadata({ topics: [topic], forceUpdate: true }) // else it wraps partitions it does not know
    const { offsets } = await producers[idempotent].send({
      acks: -1,
      compression,
      messages: records.map(([key, value, timestamp, headers]) => ({
        topic,
        partition,
        key: bytes(key) ?? undefined,
        value: bytes(value) ?? undefined,
        timestamp: timestamp === null ? undefined : BigInt(timestamp),
        headers: new Map(headers.map(([name, value]) => [Buffer.from(name), bytes(value)])),
      })),
    })
    return offsets[0].offset
  },

  async fetch({ topic, positions, maxBytes }) {
    const { consumer } = await clients
    const metadata = await consumer.metadata({ topics: [topic], forceUpdate: true })
    const { id, partitions } = metadata.topics.get(topic)
    const found = []
    for (const node of new Set(partitions.map(({ leader }) => leader))) {
      const wanted = positions
        .filter(([partition]) => partitions[partition].leader === node)
        .map(([partition, offset]) => ({
          partition,
          currentLeaderEpoch: -1,
          fetchOffset: BigInt(offset),
          lastFetchedEpoch: -1,
          partitionMaxBytes: maxBytes,
        }))
      const answer = await consumer.fetch({ node, maxWaitTime: 500, topics: [{ topicId: id, partitions: wanted }] })
      for (const { partitionIndex, records } of answer.responses.flatMap(each => each.partitions)) {
        for (const batch of records ?? []) {
          for (const { offsetDelta, timestampDelta, key, value, headers } of batch.records) {
            const pairs = headers.map(([name, value]) => [name.toString(), text(value)])
            const timestamp = batch.attributes & 8 ? batch.maxTimestamp : batch.firstTimestamp + timestampDelta
            const offset = batch.firstOffset + BigInt(offsetDelta)
            found.push([partitionIndex, offset, text(key), text(value), timestamp, pairs])
          }
        }
      }
    }
    return found
  },

  async createTopic({ topic, partitions, configs }) {
    const { admin } = await clients
    const asked = Object.entries(configs).map(([name, value]) => ({ name, value }))
    await admin.createTopics({ topics: [topic], partitions, replicas: 1, configs: asked })
  },
  async deleteTopic({ topic }) {
    const { admin } = await clients
    await admin.deleteTopics({ topics: [topic] })
  },
  async topics() {
    const { admin } = await clients
    return admin.listTopics()
  },
  async partitions({ topic }) {
    const { admin } = await clients
    const metadata = await admin.metadata({ topics: [topic], forceUpdate: true })
    return metadata.topics.get(topic).partitions.map((_, index) => index)
  },
  async createPartitions({ topic, count }) {
    const { admin } = await clients
    await admin.createPartitions({ topics: [{ name: topic, count, assignments: null }] })
  },
  async deleteRecords({ topic, partition, offset }) {
    const { admin } = await clients
    await admin.deleteRecords({ topics: [{ name: topic, partitions: [{ partition, offset: BigInt(offset) }] }] })
  },
  async configs({ topic }) {
    const { admin } = await clients
    const [{ configs }] = await admin.describeConfigs({ resources: [{ resourceType: TOPIC, resourceName: topic }] })
    return Object.fromEntries(configs.map(({ name, value }) => [name, value]))
  },
  async alterConfig({ topic, name, value }) {
    const { admin } = await clients
    const configs = [{ name, configOperation: SET, value }]
    await admin.incrementalAlterConfigs({ resources: [{ resourceType: TOPIC, resourceName: topic, configs }] })
  },
  async offsets({ topic }) {
    const lows = await listed(topic, -2n)
    const highs = await listed(topic, -1n)
    return lows.map(([partition, low], index) => [partition, low, highs[index][1]])
  },
  async offsetsAt({ topic, timestamp }) {
    return listed(topic, BigInt(timestamp))
  },
  async groups() {
    const { admin } = await clients
    return [...(await admin.listGroups({ types: ['classic', 'consumer'] })).keys()]
  },
  async describeGroup({ group }) {
    const { admin } = await clients
    const found = (await admin.describeGroups({ groups: [group] })).get(group)
    const owned = [...found.members.values()].flatMap(({ assignments }) => [...assignments.values()])
    return [found.state, owned.flatMap(({ topic, partitions }) => partitions.map(partition => [topic, partition]))]
  },
  async groupOffsets({ group, topic }) {
    const { admin } = await clients
    const [{ topics }] = await admin.listConsumerGroupOffsets({ groups: [group] })
    const partitions = topics.filter(({ name }) => name === topic).flatMap(each => each.partitions)
    return partitions.map(({ partitionIndex, committedOffset }) => [partitionIndex, Number(committedOffset)])
  },
  async setGroupOffsets({ group, topic, offsets }) {
    const { admin } = await clients
    const partitionOffsets = offsets.map(([partition, offset]) => ({ partition, offset: BigInt(offset) }))
    const topics = [{ name: topic, partitionOffsets }]
    await admin.alterConsumerGroupOffsets({ groupId: group, topics })
  },
  async deleteGroupOffset({ group, topic, partition }) {
    const { admin } = await clients
    await admin.deleteConsumerGroupOffsets({ groupId: group, topics: [{ name: topic, partitionIndexes: [partition] }] })
  },
  async deleteGroup({ group }) {
    const { admin } = await clients
    await admin.deleteGroups({ groups: [group] })
  },
})
