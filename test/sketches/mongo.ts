/**
 * A sketch of an engine to come, to hold the seam open for it: MongoDB, which has no SQL at all. A lock is a document
 * that the transaction writes to. The server does not let a second writer wait: it ends that transaction at once, so
 * the waiting is done here, with a new transaction each time. Hence a lock that is had is never older than a snapshot.
 */
import { type Probed, unsupported } from "../../packages/holdfast/src/seam/capabilities.ts";
import type {
  Connection,
  Database,
  DriverError,
  Engine,
  Failure,
  LockGrant,
} from "../../packages/holdfast/src/seam/database.ts";
import { NotInTransactionError, UnsupportedError } from "../../packages/holdfast/src/seam/errors.ts";
import type { LockRequest } from "../../packages/holdfast/src/seam/key.ts";
import { sleep } from "../../packages/holdfast/src/waiting/wait.ts";

export interface MongoSession {
  startTransaction(options?: { maxCommitTimeMS?: number }): void;
  commitTransaction(): Promise<unknown>;
  abortTransaction(): Promise<unknown>;
  endSession(): Promise<void>;
  inTransaction(): boolean;
}
export interface MongoDb<Session extends MongoSession> {
  collection(name: string): {
    updateOne(
      filter: { _id: unknown },
      update: { $inc: Record<string, number> },
      options: { upsert: boolean; session: Session },
    ): Promise<unknown>;
  };
  command(command: { buildInfo: 1 }): Promise<{ version?: string }>;
}
export interface MongoClient<Session extends MongoSession> {
  startSession(): Session;
  db(name?: string): MongoDb<Session>;
}

/** No SqlConnection: there is nothing to send a statement with. */
interface MongoConnection extends Connection {
  readonly session: MongoSession;
  version(): Promise<string>;
  /** Writes to the lock's document inside the session's transaction. */
  touch(id: string): Promise<void>;
}

const failures: Readonly<Record<number, Failure>> = {
  112: "serialization",
  11000: "unique",
  50: "deadline",
  251: "aborted",
  11600: "lost",
};
const classify = ({ code }: DriverError) => (typeof code === "number" ? failures[code] : undefined);
const labelled = (error: unknown, label: string) =>
  (error as { errorLabels?: string[] }).errorLabels?.includes(label) === true;

/** False: somebody else has written to one of them, and the server has ended the transaction. */
async function take({ touch }: MongoConnection, locks: readonly LockRequest[]): Promise<boolean> {
  try {
    for (const { key } of locks) await touch(key.id);
    return true;
  } catch (error) {
    if (classify(error as DriverError) === "serialization") return false;
    throw error;
  }
}

const mongoEngine = {
  name: "mongo",
  quotas: unsupported("not sketched"),
  stock: unsupported("not sketched"),
  queues: unsupported("not sketched"),
  schedules: unsupported("not sketched"),
  audit: unsupported("not sketched"),
  async probe(connection, { client }): Promise<Probed> {
    return {
      engine: "mongo",
      flavour: "mongo",
      version: await connection.version(),
      client,
      transactionLocks: "lock row",
      joinedLocks: "lock row",
      sessionLocks: unsupported("the server keeps nothing for a session that is in no transaction"),
      exclusion: "held",
      sharedLocks: unsupported("a document is written by one transaction at a time"),
      rowLocks: unsupported("not sketched"),
      tableLocks: unsupported("not sketched"),
      leases: unsupported("not sketched"),
      wake: unsupported("not sketched"),
      versions: unsupported("not sketched"),
      once: unsupported("not sketched"),
      savepoints: unsupported("not sketched"),
      granularity: "key",
      // Whatever is asked for, transactions here read a snapshot, which is stricter than the first.
      lockIsolation: ["read committed", "repeatable read"],
      lockFirstIsolation: [],
      isolation: ["read committed", "repeatable read"],
      defaultIsolation: "repeatable read",
      cancel: true,
      serverDeadline: unsupported("transactionLifetimeLimitSeconds is one for the whole server"),
      commitOutcome: unsupported("only the session that sent a COMMIT can ask again"),
      holders: unsupported("the server does not tell whose write was met"),
      inspect: unsupported("not sketched"),
      foreignKeys: unsupported("key.hashtext is a hash of another server"),
      currentReads: true,
      namedLocks: unsupported("key.getLock is a lock of another server"),
      connections: "many",
    };
  },
  async begin(connection, { locks, wait, deadlineMs, signal }) {
    const until = performance.now() + (wait === "nowait" ? 0 : wait);
    for (let pause = 1; ; pause = Math.min(pause * 1.5, 50)) {
      connection.session.startTransaction({ maxCommitTimeMS: deadlineMs });
      if (await take(connection, locks)) return { granted: true, begun: {} };
      await connection.session.abortTransaction();
      if (wait === "nowait") return { granted: false, reason: "busy", usable: false };
      if (performance.now() >= until) return { granted: false, reason: "timeout", usable: false };
      await sleep(pause * (0.5 + Math.random()), signal);
    }
  },
  async end({ session }, how) {
    if (how === "rollback") {
      if (session.inTransaction()) await session.abortTransaction();
      return true;
    }
    // COMMIT may be sent again by the session that sent it: then its answer is not lost with the connection.
    for (let left = 5; ; left--) {
      try {
        await session.commitTransaction();
        return true;
      } catch (error) {
        if (left === 0 || !labelled(error, "UnknownTransactionCommitResult")) throw error;
      }
    }
  },
  async savepoint() {
    throw new UnsupportedError("A nested transaction: MongoDB has no savepoints");
  },
  async lock(connection, { locks }): Promise<LockGrant> {
    return (await take(connection, locks))
      ? { granted: true }
      : { granted: false, reason: "busy", usable: false };
  },
  classify,
  // Collections come into being with their first document.
  migrations: {
    all: [],
    print: () => "",
    record: () => ({ parts: [""], values: [] }),
    applied: async () => [],
    apply: async () => [],
  },
} satisfies Engine<MongoConnection>;

export function fromMongo<Session extends MongoSession>(client: MongoClient<Session>) {
  const db = client.db();
  const connectionOf = (session: Session): MongoConnection => ({
    lost: new AbortController().signal,
    session,
    version: async () => String((await db.command({ buildInfo: 1 })).version),
    async touch(id) {
      const options = { upsert: true, session };
      await db.collection("holdfast_lock").updateOne({ _id: id }, { $inc: { turn: 1 } }, options);
    },
    // Waits happen between statements here, and these look at the signal.
    cancel: async () => {},
  });
  return {
    engine: mongoEngine,
    traits: {
      client: "mongodb",
      cancel: true,
      listen: false,
      embedded: false,
      single: false,
      pinned: true,
      begins: false,
    },
    // Not by session.withTransaction, which runs the body again by itself: two loops of retries would multiply.
    async connect() {
      const session = client.startSession();
      return { connection: connectionOf(session), native: session, release: () => session.endSession() };
    },
    join(native) {
      if (native.inTransaction()) return connectionOf(native);
      throw new NotInTransactionError("this session is in no transaction");
    },
    unwrap: (error) =>
      labelled(error, "TransientTransactionError") && classify(error as DriverError) === undefined
        ? { lost: true }
        : undefined,
  } satisfies Database<Session, MongoConnection>;
}
