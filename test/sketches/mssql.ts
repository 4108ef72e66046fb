/**
 * A sketch of an engine to come, to hold the seam open for it: SQL Server through `mssql`. What is different there:
 * hints stand inside FROM, savepoints cannot be released, locks are taken by a procedure that answers with a number,
 * and what the client hands out is a transaction, which is no connection: requests are made of it.
 */
import { type Probed, unsupported } from "../../packages/holdfast/src/seam/capabilities.ts";
import type {
  Database,
  Engine,
  Failure,
  LockGrant,
  LockCall,
  Row,
  SqlConnection,
} from "../../packages/holdfast/src/seam/database.ts";
import {
  NotInTransactionError,
  ServerTooOldError,
  UsageError,
} from "../../packages/holdfast/src/seam/errors.ts";
import type { LockRequest } from "../../packages/holdfast/src/seam/key.ts";
import { type Dialect, render, sql } from "../../packages/holdfast/src/seam/sql.ts";

export interface MssqlRequest {
  input(name: string, value: unknown): this;
  query(text: string): Promise<{ recordset?: Row[]; rowsAffected: number[] }>;
  execute(procedure: string): Promise<{ returnValue: number }>;
  cancel(): void;
}
export interface MssqlTransaction {
  begin(isolation?: number): Promise<unknown>;
  commit(): Promise<void>;
  rollback(): Promise<void>;
  on(event: "rollback", listener: (aborted: boolean) => void): unknown;
}
/** What `import sql from "mssql"` brings, as far as it is needed. */
export interface Mssql<Pool, Tx extends MssqlTransaction> {
  readonly Transaction: new (pool: Pool) => Tx;
  readonly Request: new (tx: Tx) => MssqlRequest;
}

/** It speaks SQL, and calls procedures besides. */
interface MssqlConnection extends SqlConnection {
  execute(procedure: string, inputs: Readonly<Record<string, unknown>>): Promise<number>;
}

const dialect: Dialect = {
  placeholder: (i) => `@p${i}`,
  quote: (name) => `[${name.replaceAll("]", "]]")}]`,
  names: { schema: "holdfast", own: (name) => `holdfast.${name}`, label: (name) => `holdfast_${name}` },
};
/** As `mssql.ISOLATION_LEVEL` numbers them. */
const levels = { "read uncommitted": 1, "read committed": 2, "repeatable read": 3, serializable: 4 };

const failures: Readonly<Record<number, Failure>> = {
  1205: "deadlock",
  3960: "serialization",
  1222: "lock-timeout",
  2601: "unique",
  2627: "unique",
  3930: "aborted",
  3906: "read-only",
};

const resource = ({ key }: LockRequest) => ({ Resource: `holdfast:${key.id}`, LockOwner: "Transaction" });

/** 0 and 1 are grants. A deadlock is an answer here and not an error, so it is made one. */
async function lock(connection: MssqlConnection, { locks, wait }: LockCall): Promise<LockGrant> {
  for (const [i, request] of locks.entries()) {
    const answer = await connection.execute("sp_getapplock", {
      LockMode: request.mode === "shared" ? "Shared" : "Exclusive",
      ...resource(request),
      LockTimeout: wait === "nowait" ? 0 : wait,
    });
    if (answer >= 0) continue;
    if (answer === -3) throw Object.assign(new Error("chosen as deadlock victim"), { number: 1205 });
    if (answer !== -1) throw new UsageError(`sp_getapplock answered ${answer}`);
    // Rolling back to a savepoint would not give these back.
    for (const taken of locks.slice(0, i)) await connection.execute("sp_releaseapplock", resource(taken));
    return { granted: false, reason: wait === "nowait" ? "busy" : "timeout", usable: true };
  }
  return { granted: true };
}

const mssqlEngine = {
  name: "mssql",
  quotas: unsupported("not sketched"),
  stock: unsupported("not sketched"),
  queues: unsupported("not sketched"),
  schedules: unsupported("not sketched"),
  audit: unsupported("not sketched"),
  async probe(connection, { client, cancel }): Promise<Probed> {
    const question = sql`SELECT SERVERPROPERTY('ProductMajorVersion') AS major`;
    const major = Number((await connection.query(question)).rows[0]?.["major"]);
    if (!(major >= 15))
      throw new ServerTooOldError(`SQL Server ${major}`, "SQL Server 2019", "it is out of support");
    return {
      engine: "mssql",
      flavour: "mssql",
      version: String(major),
      client,
      transactionLocks: "transaction advisory",
      joinedLocks: "transaction advisory",
      sessionLocks: unsupported("the pool gives no connection of one's own outside of a transaction"),
      exclusion: "held",
      sharedLocks: true,
      rowLocks: unsupported("not sketched"),
      tableLocks: unsupported("not sketched"),
      leases: unsupported("not sketched"),
      wake: unsupported("not sketched"),
      versions: unsupported("not sketched"),
      once: unsupported("not sketched"),
      savepoints: true,
      granularity: "key",
      lockIsolation: ["read committed"],
      lockFirstIsolation: [],
      isolation: ["read uncommitted", "read committed", "repeatable read", "serializable"],
      defaultIsolation: "read committed",
      cancel: cancel || unsupported("this client cannot"),
      serverDeadline: unsupported("the server has no limit for a whole transaction"),
      commitOutcome: true,
      holders: unsupported("it takes VIEW SERVER STATE, which applications seldom have"),
      inspect: unsupported("not sketched"),
      foreignKeys: unsupported("key.hashtext is a hash of another server"),
      currentReads: true,
      namedLocks: unsupported("key.getLock is a lock of another server"),
      connections: "many",
    };
  },
  async begin(connection, open) {
    const grant = await lock(connection, { ...open, joined: false });
    if (!grant.granted) return grant;
    const identity = crypto.randomUUID();
    if (!open.readOnly) await connection.query(sql`INSERT INTO holdfast_commit (id) VALUES (${identity})`);
    return { granted: true, begun: { identity } };
  },
  // The client ends its transactions by itself.
  end: async () => true,
  async savepoint(connection, name, action) {
    if (action === "set") await connection.query(sql.raw(`SAVE TRANSACTION ${name}`));
    if (action === "rollback") await connection.query(sql.raw(`ROLLBACK TRANSACTION ${name}`));
  },
  lock,
  async outcome(connection, identity) {
    // The hint makes the read wait for a transaction that is still under way, where a version store would not.
    const seen = sql`SELECT 1 AS one FROM holdfast_commit WITH (READCOMMITTEDLOCK, UPDLOCK) WHERE id = ${identity}`;
    return (await connection.query(seen)).rows.length > 0 ? "committed" : "aborted";
  },
  query: (connection, statement) => connection.query(statement),
  classify(error) {
    const { number, message = "" } = error as { number?: number; message?: string };
    // One number for both.
    if (number === 547) return message.includes("CHECK") ? "check" : "foreign-key";
    return number === undefined ? undefined : failures[number];
  },
  migrations: {
    all: [
      {
        id: 1,
        name: "commits",
        statements: [sql`CREATE TABLE holdfast_commit (id uniqueidentifier PRIMARY KEY)`],
      },
    ],
    print: (statement) => `${render(statement, dialect).text};`,
    record: ({ id, name }) =>
      sql.raw(
        `INSERT INTO holdfast_migration (id, name) SELECT ${id}, '${name}' WHERE NOT EXISTS (SELECT 1 FROM holdfast_migration WHERE id = ${id})`,
      ),
    applied: async () => [],
    apply: async () => [],
  },
} satisfies Engine<MssqlConnection>;

export function fromMssql<Pool, Tx extends MssqlTransaction>(module: Mssql<Pool, Tx>, pool: Pool) {
  const connectionOf = (tx: Tx): MssqlConnection => {
    const lost = new AbortController();
    tx.on("rollback", (aborted) => aborted && lost.abort(new Error("the server ended the transaction")));
    let running: MssqlRequest | undefined;
    const request = () => (running = new module.Request(tx));
    return {
      lost: lost.signal,
      async query(statement) {
        const { text, values } = render(statement, dialect);
        const made = values.reduce<MssqlRequest>((r, value, i) => r.input(`p${i + 1}`, value), request());
        const { recordset = [], rowsAffected } = await made.query(text);
        return { rows: recordset, affected: rowsAffected.at(-1) ?? 0 };
      },
      async execute(procedure, inputs) {
        const made = Object.entries(inputs).reduce<MssqlRequest>(
          (r, [name, v]) => r.input(name, v),
          request(),
        );
        return (await made.execute(procedure)).returnValue;
      },
      cancel: async () => running?.cancel(),
    };
  };
  return {
    engine: mssqlEngine,
    traits: {
      client: "mssql",
      cancel: true,
      listen: false,
      embedded: false,
      single: false,
      pinned: false,
      begins: true,
    },
    async transaction({ isolation }, body) {
      const tx = new module.Transaction(pool);
      await tx.begin(levels[isolation]);
      try {
        const value = await body({ connection: connectionOf(tx), native: tx });
        await tx.commit();
        return value;
      } catch (error) {
        await tx.rollback().catch(() => {});
        throw error;
      }
    },
    join(native) {
      if (native instanceof module.Transaction) return connectionOf(native);
      throw new NotInTransactionError("this is no Transaction of mssql");
    },
  } satisfies Database<Tx, MssqlConnection>;
}
