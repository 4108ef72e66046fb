/**
 * PostgreSQL whose schemas are spread over the nodes of Citus, each of them whole on one node (`citus_schema_distribute`). What is
 * decided together is in one schema, so no key of ours needs another column, and no statement of ours touches two nodes.
 *
 * The functions are not used: Citus plans each of their statements anew, and refuses some (lists that are joined with a subquery, a
 * plan that is kept, `clock_timestamp()` in a WHERE that writes). The generic stores send plain statements about rows, which it takes
 * all of. docs/decisions/0035-citus.md
 */
import { type Probed, type Unsupported, unsupported } from "../../seam/capabilities.ts";
import type { Agreements } from "../../seam/agreements.ts";
import type { Engine, SqlConnection } from "../../seam/database.ts";
import { UnsupportedError, message } from "../../seam/errors.ts";
import { undone } from "../../seam/failure.ts";
import { type Names, Own, own, sql } from "../../seam/sql.ts";
import { auditStore } from "../sql/audit.ts";
import type { StoreDialect } from "../sql/dialect.ts";
import { queueStore } from "../sql/queue/index.ts";
import { quotaStore } from "../sql/quota/index.ts";
import { scheduleStore } from "../sql/schedule.ts";
import { stockStore } from "../sql/stock/index.ts";
import { agreements as plainAgreements } from "./agreements.ts";
import { namesIn, dialect as plain, schemaOf } from "./dialect.ts";
import { refuseFilled } from "./filled.ts";
import { postgres } from "./index.ts";
import { migrationsIn } from "./schema.ts";
import { failureOf } from "./locks/index.ts";
import { genericRights } from "./rights.ts";
import { groupOf, isSpread, nodesDecide, probeServer } from "./probe.ts";
import { storeDialect, transactionsBy } from "./store-dialect.ts";

/** SET LOCAL, and no function, is what Citus tells its nodes: they are where rows are waited for. Elsewhere it is a word without meaning. */
const patience = (ms: string) => [
  "SET LOCAL citus.propagate_set_commands TO 'local'",
  // Digits and a unit: ours, or what the server itself has said.
  `SET LOCAL lock_timeout TO '${/^\d+\w*$/.exec(ms)?.[0] ?? "0"}'`,
];

async function send(connection: SqlConnection, statements: readonly string[]): Promise<void> {
  if (connection.script) await connection.script(statements.join(";"));
  else for (const each of statements) await connection.query(sql.raw(each));
}

/** The node that has the schema may have committed before its answer was lost on the way to the node that was asked. */
class NodeSilent extends Error {
  readonly lost = true;
  constructor(cause: unknown) {
    super(`COMMIT was answered with an error, and a node may have committed: ${message(cause)}`, { cause });
  }
}

const { exclude: _, ...byRows } = storeDialect;

const dialect: StoreDialect<SqlConnection> = {
  // Advisory locks are those of one node.
  ...byRows,
  // Whoever writes without a lock says until when that holds, by the clock: Citus refuses it.
  optimistic: false,
  // Citus would compute them here and copy them to the node, and answer whatever may come of that with XX000: also a duplicate key.
  insertsGiven: false,
  ...transactionsBy({
    begin: (connection, ms) =>
      send(connection, ["BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE", ...patience(ms)]),
    set: (connection, ms) => send(connection, patience(ms)),
    atCommit: (connection, error) =>
      undone.has(failureOf(connection, error)) ? error : new NodeSilent(error),
  }),
};

const stores = {
  quotas: quotaStore(dialect),
  stock: stockStore(dialect),
  queues: queueStore(dialect),
  schedules: scheduleStore(dialect),
  audit: auditStore(dialect),
};

const { all } = migrationsIn(plain.names);

/** A sequence is not the same on all nodes: whoever changes the map waits until everybody has read it again. */
const { map: _map, ...withoutMap } = plainAgreements;

const agreements: Agreements<SqlConnection> = {
  ...withoutMap,
  async write(connection, name, value) {
    // The plain schema may have been used after the places were made.
    if (name === "shard") await refuseFilled(connection, all);
    return withoutMap.write(connection, name, value);
  },
};

const noLease = unsupported(
  "leases are decided by functions, which are not for schemas that Citus spreads; use an instance that is not fromCitus, in a schema of its own",
);
const noLocks = unsupported(
  "this is a worker node of Citus: a lock that is taken here excludes nobody who is connected to another node. Connect to the coordinator",
);
const noNumbers = unsupported(
  "this is a worker node of Citus, which has numbers of its own: what comes later here may have a smaller one than what came before elsewhere. Connect to the coordinator",
);

/** From a worker node only what is kept exact by rows alone. */
const onWorker = {
  transactionLocks: noLocks,
  joinedLocks: noLocks,
  sessionLocks: noLocks,
  sharedLocks: noLocks,
  foreignKeys: noLocks,
  once: noLocks,
  queues: noNumbers,
  schedules: noNumbers,
  audit: noNumbers,
} satisfies { readonly [name in keyof Probed]?: Unsupported };

/** Of a place, from whatever node. */
const everywhere = { leases: noLease, commitOutcome: nodesDecide };

/** The schema is given to a node before its tables come, so that nothing is left behind on the coordinator. */
async function spread(connection: SqlConnection): Promise<void> {
  await refuseFilled(connection, all);
  if ((await isSpread(connection)) !== false) return;
  if ((await groupOf(connection)) !== 0)
    throw new UnsupportedError("migrate: this is a worker node of Citus. Connect to the coordinator");
  await connection.query(sql`CREATE SCHEMA IF NOT EXISTS ${new Own(schemaOf)}`);
  await connection.query(
    sql`SELECT pg_catalog.citus_schema_distribute(oid::pg_catalog.regnamespace)::pg_catalog.text FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) ${own.schema}`,
  );
}

function spreading(base: Engine<SqlConnection>, names: Names): Engine<SqlConnection> {
  // The generic stores begin their own transactions.
  const { outcome: _outcome, apart: _apart, checking: _checking, ...rest } = base;
  return {
    ...rest,
    ...stores,
    agreements,
    migrations: migrationsIn(names, spread, genericRights),
    async probe(connection, traits, wish) {
      const probed = await probeServer(connection, traits, wish);
      const worker = probed.details?.["citus"] === true && (await groupOf(connection)) !== 0;
      return { ...probed, ...everywhere, ...(worker && onWorker) };
    },
    named(schema) {
      const chosen = base.named?.(schema);
      if (!chosen) return undefined;
      return { ...chosen, engine: spreading(chosen.engine, namesIn(schema)) };
    },
  };
}

export const citus: Engine<SqlConnection> = spreading(postgres, plain.names);
