// KafkaJS as a peer. It has no consumer without a group, so records are fetched by its own cluster and broker
// classes, one layer below; they speak the protocol and decode the records just the same.

'use strict'

const { AssignerProtocol, CompressionCodecs, CompressionTypes, ConfigResourceTypes, Kafka, logLevel } = require('kafkajs')
const Cluster = require('kafkajs/src/cluster')
const socketFactory = require('kafkajs/src/network/socketFactory')
const { createLogger } = require('kafkajs/src/loggers')
const console_ = require('kafkajs/src/loggers/console')
const SnappyCodec = require('kafkajs-snappy')
const lz4 = require('lz4-napi')
const zstd = require('@mongodb-js/zstd')
const { bytes, serve, text } = require('./lines.js')

CompressionCodecs[CompressionTypes.Snappy] = SnappyCodec
CompressionCodecs[CompressionTypes.LZ4] = () => ({
  compress: encoder => lz4.compressFrame(encoder.buffer),
  decompress: buffer => lz4.decompressFrame(buffer),
})
CompressionCodecs[CompressionTypes.ZSTD] = () => ({
  compress: encoder => zstd.compress(encoder.buffer, 3),
  decompress: buffer => zstd.decompress(buffer),
})
const COMPRESSION = {
  none: CompressionTypes.None,
  gzip: CompressionTypes.GZIP,
  snappy: CompressionTypes.Snappy,
  lz4: CompressionTypes.LZ4,
  zstd: CompressionTypes.ZSTD,
}

const address = process.argv[2]
const kafka = new Kafka({ clientId: 'kafkajs', brokers: [address], logLevel: logLevel.NOTHING, retry: { retries: 3 } })
const cluster = new Cluster({
  logger: createLogger({ level: logLevel.NOTHING, logCreator: console_ }),
  socketFactory: socketFactory(),
  brokers: [address],
  clientId: 'kafkajs',
  connectionTimeout: 5000,
  requestTimeout: 30000,
  enforceRequestTimeout: true,
  metadataMaxAge: 300000,
  allowAutoTopicCreation: false,
  isolationLevel: 0,
  retry: { retries: 3 },
  offsets: new Map(),
})
const admin = kafka.admin()
const producers = new Map()

async function producer(idempotent) {
  if (!producers.has(idempotent)) {
    const made = kafka.producer({ idempotent, allowAutoTopicCreation: false, createPartitioner: () => ({ message }) => message.partition })
    await made.connect()
    producers.set(idempotent, made)
  }
  return producers.get(idempotent)
}

// A name that occurs more than once is a list of values in KafkaJS, both ways.
function headersIn(pairs) {
  const headers = {}
  for (const [name, value] of pairs) {
    if (name in headers) headers[name] = [headers[name], bytes(value)].flat()
    else headers[name] = bytes(value)
  }
  return headers
}

const headersOut = headers =>
  Object.entries(headers).flatMap(([name, value]) => (Array.isArray(value) ? value : [value]).map(each => [name, text(each)]))

const connected = (async () => {
  await admin.connect()
  await cluster.connect()
})()

serve({
  async produce({ topic, partition, records, compression, idempotent }) {
    const client = await producer(idempotent)
    const [{ baseOffset }] = await client.send({
      topic,
      acks: -1,
      compression: COMPRESSION[compression],
      messages: records.map(([key, value, timestamp, headers]) => ({
        partition,
        key: bytes(key),
        value: bytes(value),
        timestamp: timestamp === null ? undefined : String(timestamp),
        headers: headersIn(headers),
      })),
    })
    return Number(baseOffset)
  },

  async fetch({ topic, positions, maxBytes }) {
    await connected
    cluster.targetTopics.clear()
    await cluster.addTargetTopic(topic)
    await cluster.refreshMetadata()
    const byLeader = cluster.findLeaderForPartitions(topic, positions.map(([partition]) => partition))
    const at = new Map(positions)
    const found = []
    for (const [node, partitions] of Object.entries(byLeader)) {
      const broker = await cluster.findBroker({ nodeId: node })
      const wanted = partitions.map(partition => ({ partition, fetchOffset: String(at.get(partition)), maxBytes }))
      const answer = await broker.fetch({ maxWaitTime: 500, minBytes: 1, topics: [{ topic, partitions: wanted }] })
      for (const { partitions } of answer.responses) {
        for (const { partition, messages } of partitions) {
          for (const { offset, timestamp, key, value, headers } of messages) {
            found.push([partition, Number(offset), text(key), text(value), Number(timestamp), headersOut(headers)])
          }
        }
      }
    }
    return found
  },

  async createTopic({ topic, partitions, configs }) {
    await connected
    const configEntries = Object.entries(configs).map(([name, value]) => ({ name, value }))
    // It answers false, and does not throw, when there is such a topic.
    const made = await admin.createTopics({ topics: [{ topic, numPartitions: partitions, replicationFactor: 1, configEntries }] })
    if (!made) throw new Error(`${topic} exists`)
  },
  async createPartitions({ topic, count }) {
    await connected
    await admin.createPartitions({ topicPartitions: [{ topic, count }] })
    // Its producers would know of the new partitions only when their metadata is five minutes old.
    for (const made of producers.values()) await made.disconnect()
    producers.clear()
  },
  async deleteTopic({ topic }) {
    await connected
    return admin.deleteTopics({ topics: [topic] })
  },
  async topics() {
    await connected
    return admin.listTopics()
  },
  async partitions({ topic }) {
    await connected
    const { topics } = await admin.fetchTopicMetadata({ topics: [topic] })
    return topics[0].partitions.map(({ partitionId }) => partitionId)
  },
  async offsets({ topic }) {
    await connected
    const offsets = await admin.fetchTopicOffsets(topic)
    return offsets.map(({ partition, low, high }) => [partition, Number(low), Number(high)])
  },
  async offsetsAt({ topic, timestamp }) {
    await connected
    const offsets = await admin.fetchTopicOffsetsByTimestamp(topic, timestamp)
    return offsets.map(({ partition, offset }) => [partition, Number(offset)])
  },
  async deleteRecords({ topic, partition, offset }) {
    await connected
    await admin.fetchTopicOffsets(topic) // else it does not know the partition's leader
    return admin.deleteTopicRecords({ topic, partitions: [{ partition, offset: String(offset) }] })
  },
  async configs({ topic }) {
    await connected
    const { resources } = await admin.describeConfigs({ resources: [{ type: ConfigResourceTypes.TOPIC, name: topic }] })
    return Object.fromEntries(resources[0].configEntries.map(({ configName, configValue }) => [configName, configValue]))
  },
  async groups() {
    await connected
    return (await admin.listGroups()).groups.map(({ groupId }) => groupId)
  },
  async describeGroup({ group }) {
    await connected
    const { groups } = await admin.describeGroups([group])
    const assignments = groups[0].members.map(each => AssignerProtocol.MemberAssignment.decode(each.memberAssignment))
    const owned = assignments.flatMap(({ assignment }) => Object.entries(assignment))
    return [groups[0].state, owned.flatMap(([topic, partitions]) => partitions.map(partition => [topic, partition]))]
  },
  async groupOffsets({ group, topic }) {
    await connected
    const [{ partitions }] = await admin.fetchOffsets({ groupId: group, topics: [topic] })
    return partitions.map(({ partition, offset }) => [partition, Number(offset)]).filter(([, offset]) => offset >= 0)
  },
  async setGroupOffsets({ group, topic, offsets }) {
    await connected
    const partitions = offsets.map(([partition, offset]) => ({ partition, offset: String(offset) }))
    await admin.setOffsets({ groupId: group, topic, partitions })
  },
  async deleteGroup({ group }) {
    await connected
    await admin.deleteGroups([group])
  },
  async cluster() {
    await connected
    const { brokers, controller, clusterId } = await admin.describeCluster()
    return { brokers: brokers.map(({ host, port }) => [host, port]), controller, clusterId }
  },
})
