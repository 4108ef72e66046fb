/**
 * Reads along what clients and servers say to each other. Once it has begun it goes on between explorations, so that a
 * statement that is prepared now and executed in the next one is known by its text; holding back is somebody else's.
 */
import { AsyncLocalStorage } from "node:async_hooks";
import { Socket } from "node:net";
import { UsageError } from "../../seam/errors.ts";
import type { ProtocolReader } from "../../seam/protocol-reader.ts";
import type { Actor } from "./actor.ts";

/** Whose doing it is. */
export const current = new AsyncLocalStorage<Actor>();

export type Write = (chunk: Uint8Array | string, ...rest: unknown[]) => boolean;
type Emit = (event: string | symbol, ...rest: unknown[]) => boolean;

export interface Listener {
  /** True: it is not to be written now. */
  writes(socket: Socket, args: Parameters<Write>): boolean;
  /** Handles an event of a connection, and passes it on, or does not. */
  hears(socket: Socket, event: string | symbol, rest: unknown[], pass: Pass): boolean;
}

/** Passes an event on: as it is, or something else in place of what was heard. */
export type Pass = (other?: Uint8Array) => boolean;

let listener: Listener | undefined;
let original: Write | undefined;
const readers = new WeakMap<Socket, ProtocolReader>();

export function listen(to: Listener): void {
  if (listener) throw new UsageError("explore: one at a time in a process");
  listener = to;
  readAlong();
}

/** From here on, whether somebody listens or not. */
export function readAlong(): void {
  if (original) return;
  const write = Socket.prototype.write as unknown as Write;
  original = write;
  (Socket.prototype as { write: unknown }).write = function (this: Socket, ...args: Parameters<Write>) {
    // Also when the exploration is long over.
    if (current.getStore()?.crashed && (this.remotePort !== undefined || readers.has(this))) {
      this.destroy();
      return true;
    }
    if (listener) return listener.writes(this, args) || write.apply(this, args);
    readers.get(this)?.sent(bytes(args));
    return write.apply(this, args);
  };
}

export function stopListening(): void {
  listener = undefined;
}

/** TCP, or a Unix socket: terminals and pipes are sockets too, and what goes over these is told apart when it is read. */
export function isConnection(socket: Socket): boolean {
  return (
    socket.remotePort !== undefined ||
    !(socket === process.stdout || socket === process.stderr || "isTTY" in socket)
  );
}

/** The one that has read along from the first time it was asked for. */
export function readerOf(socket: Socket, make: () => ProtocolReader): ProtocolReader {
  const known = readers.get(socket);
  if (known) return known;
  const reader = make();
  readers.set(socket, reader);
  const emit = socket.emit.bind(socket) as Emit;
  (socket as { emit: Emit }).emit = (event, ...rest) => {
    if (listener) {
      const pass: Pass = (other) => (other ? emit("data", other) : emit(event, ...rest));
      return listener.hears(socket, event, rest, pass);
    }
    if (event === "data") reader.received(rest[0] as Buffer);
    return emit(event, ...rest);
  };
  return reader;
}

/** Without anybody hearing of it. */
export function send(socket: Socket, ...args: Parameters<Write>): void {
  original?.apply(socket, args);
}

export function bytes([chunk, encoding]: Parameters<Write>): Uint8Array {
  return typeof chunk === "string"
    ? Buffer.from(chunk, typeof encoding === "string" ? (encoding as BufferEncoding) : "utf8")
    : chunk;
}
