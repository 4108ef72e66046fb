import { type Socket, createConnection, createServer } from "node:net";

// A wire with a delay, in a process of its own: it must not take the time of the contestants' event loop.
//
// Node's timers count whole milliseconds, which is too coarse for half of one. So while something is on its way
// this process looks at the clock in naps of a tenth, and takes a fraction of a core doing so.

const [target = 0, delayMs = 0] = process.argv.slice(2).map(Number);
const napMs = 0.1;
const bed = new Int32Array(new SharedArrayBuffer(4));

/** The delay is the same for all, so this is in the order in which they are due. */
const inFlight: { due: number; deliver: () => void }[] = [];
let awake = false;
let roundTrips = 0;

function send(deliver: () => void): void {
  inFlight.push({ due: performance.now() + delayMs, deliver });
  if (!awake) setImmediate(look);
  awake = true;
}

function look(): void {
  const now = performance.now();
  const later = inFlight.findIndex(({ due }) => due > now);
  for (const { deliver } of inFlight.splice(0, later < 0 ? inFlight.length : later)) deliver();
  const [next] = inFlight;
  awake = next !== undefined;
  if (!next) return;
  const left = next.due - performance.now();
  if (left > 0) Atomics.wait(bed, 0, 0, Math.min(left, napMs));
  setImmediate(look);
}

function join(from: Socket, to: Socket, onData: () => void): void {
  from.on("data", (chunk) => {
    onData();
    send(() => to.write(chunk));
  });
  from.on("end", () => send(() => to.end()));
  from.on("error", () => to.destroy());
}

const server = createServer({ noDelay: true, allowHalfOpen: true }, (client) => {
  const upstream = createConnection({ port: target, host: "127.0.0.1", noDelay: true, allowHalfOpen: true });
  let serverSpoke = true;
  join(client, upstream, () => {
    if (serverSpoke) roundTrips++;
    serverSpoke = false;
  });
  join(upstream, client, () => (serverSpoke = true));
});
server.listen(0, "127.0.0.1", () => {
  const address = server.address();
  if (typeof address === "object") process.send?.({ port: address?.port });
});

process.on("message", () => process.send?.({ roundTrips }));
process.on("disconnect", () => process.exit());
