/** Who is at the other end: for a client that waits for words, or cannot make sense of those that it got. */
import { UnsupportedError } from "../seam/errors.ts";

export interface Address {
  readonly host: string;
  readonly port: number;
}

type Protocol = "PostgreSQL" | "MySQL";

/** A server that says nothing for so long may be waiting for the first word of another protocol. */
const silenceMs = 2000;
/** How long the other end may take to say who it is, and how long it is given to speak first. */
const answerMs = 1500;
const greetingMs = 300;

/** Errors after which it is not known who answers: no server's own, and not of a port that nobody listens at. */
const unclear = new Set<unknown>([
  undefined,
  "ECONNRESET",
  "EPIPE",
  "ETIMEDOUT",
  "CONNECTION_CLOSED",
  "CONNECTION_DESTROYED",
  "CONNECT_TIMEOUT",
  "PROTOCOL_CONNECTION_LOST",
  "PROTOCOL_SEQUENCE_TIMEOUT",
]);

/** Pools that have had a connection: their server is the one that they take it for. */
const known = new WeakSet<object>();

/** Passes a pool's connection on. If another kind of server answers at its address, says so, before the client gives up. */
export async function reached<T>(
  pool: object,
  connecting: Promise<T>,
  speaks: Protocol,
  address: () => Address | undefined,
): Promise<T> {
  if (known.has(pool)) return connecting;
  const other = Promise.withResolvers<never>();
  const timer = setTimeout(() => {
    void wrongServer(undefined, speaks, address()).then((error) => error && other.reject(error));
  }, silenceMs);
  try {
    const made = await Promise.race([connecting, other.promise]);
    known.add(pool);
    return made;
  } catch (error) {
    // Nobody waits for it any more.
    connecting.catch(() => {});
    throw error instanceof UnsupportedError ? error : await wrongServer(error, speaks, address());
  } finally {
    clearTimeout(timer);
  }
}

/** The error, or another one that names the server which answers at the address. */
export async function wrongServer(
  thrown: unknown,
  speaks: Protocol,
  address: Address | undefined,
): Promise<unknown> {
  const code = (thrown as { code?: unknown } | undefined)?.code;
  // Of Node's own: the client read past the end of what it took for a message.
  if (!address || !(unclear.has(code) || String(code).startsWith("ERR_"))) return thrown;
  const found = await answering(address).catch(() => undefined);
  if (!found || found.protocol === speaks) return thrown;
  return new UnsupportedError(
    `${found.name} answers at ${address.host}:${address.port}, and this client speaks the protocol of ${speaks}. Look at the host and the port, or use a client of ${found.name}`,
    thrown,
  );
}

/** MySQL speaks first; PostgreSQL answers to a question about TLS, which is not written to its log. */
async function answering({ host, port }: Address): Promise<{ protocol: Protocol; name: string } | undefined> {
  const { connect } = await import("node:net");
  return new Promise((resolve) => {
    const socket = connect({ host, port });
    const ask = setTimeout(() => socket.write(Buffer.from([0, 0, 0, 8, 4, 0xd2, 0x16, 0x2f])), greetingMs);
    const end = (found?: { protocol: Protocol; name: string }) => {
      clearTimeout(ask);
      clearTimeout(limit);
      socket.destroy();
      resolve(found);
    };
    const limit = setTimeout(end, answerMs);
    socket.on("error", () => end());
    socket.on("close", () => end());
    socket.once("data", (data: Buffer) => end(speakerOf(data)));
  });
}

function speakerOf(data: Buffer): { protocol: Protocol; name: string } | undefined {
  if (data.length === 1 && (data[0] === 0x53 || data[0] === 0x4e))
    return { protocol: "PostgreSQL", name: "PostgreSQL" };
  // A packet of the right length, the first of them: a greeting of protocol 10, or an error.
  if (data.length < 5 || data[3] !== 0 || data.readUIntLE(0, 3) + 4 > data.length) return undefined;
  if (data[4] !== 10) return data[4] === 0xff ? { protocol: "MySQL", name: "MySQL" } : undefined;
  const version = data.toString("latin1", 5, data.indexOf(0, 5));
  return { protocol: "MySQL", name: /mariadb/i.test(version) ? "MariaDB" : "MySQL" };
}
