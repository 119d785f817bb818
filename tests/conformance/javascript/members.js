// A worker process of members of groups: commands on standard input, a JSON object a line, and on standard output what
// happens to each member. The clock is the system's monotonic one, as other workers' is.

'use strict'

const readline = require('node:readline')
const { told } = require('./lines.js')

function tell(event) {
  process.stdout.write(`${JSON.stringify({ at: Number(process.hrtime.bigint()), ...event })}\n`)
}

const pairs = assignment => assignment.flatMap(({ topic, partitions }) => partitions.map(partition => [topic, partition]))

// `open` gives {leave}, and is told what to do when something happens to the member.
function host(open) {
  const members = new Map()
  const leaving = new Set()
  const run = async (member, work) => {
    try {
      await work()
    } catch (error) {
      tell({ member, event: 'failed', why: told(error) })
    }
  }
  readline.createInterface({ input: process.stdin }).on('line', line => {
    const { member, do: what, ...asked } = JSON.parse(line)
    const says = (event, more) => tell({ member, event, ...more })
    const report = {
      owns: partitions => leaving.has(member) || says('owns', { partitions }),
      records: records => says('records', { records }),
      committing: offsets => says('committing', { offsets }),
      committed: offsets => says('committed', { offsets }),
      refused: (error, again = false) => says('refused', { why: told(error), again }),
      failed: error => says('failed', { why: told(error) }),
    }
    if (what === 'open') members.set(member, open(asked, report))
    else
      run(member, async () => {
        const { leave } = await members.get(member)
        report.owns([])
        leaving.add(member)
        await leave()
        members.delete(member)
        says('left')
      })
    if (what === 'open') run(member, () => members.get(member))
  }).on('close', () => process.exit(0))
  tell({ event: 'ready' })
}

module.exports = { host, pairs }
