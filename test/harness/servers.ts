import { randomInt } from "node:crypto";
import type { TestProject } from "vitest/node";
import { type EmbeddedPostgres, startPostgres } from "../../packages/cli/src/embedded.ts";
import { bundleLibrary } from "./bundle.ts";
import { type DebianPackage, installMissing } from "./debian.ts";
import { OLD_HOME, oldBinaries } from "./old-postgres.ts";
import { mariadbPackage, startMariadb } from "./mariadb.ts";
import { debootstrapPackage, startMysql } from "./mysql.ts";
import { noPatroni, patroniPackages } from "./patroni.ts";
import { pgbouncerPackage, startPgbouncer } from "./pgbouncer.ts";
import { noPgpool, pgpoolPackage } from "./pgpool.ts";
import { noPromtool, prometheusPackage } from "./promtool.ts";
import { psycopgPackage } from "./python.ts";
import type { StartedServer } from "./started-server.ts";

/** A server for the tests, or why there is none. */
export type ServerState = { url: string } | { unavailable: string };

export interface Servers {
  /** PostgreSQL 18. */
  postgres: ServerState;
  /** PgBouncer in transaction mode, in front of `postgres`. */
  pgbouncer: ServerState;
  /** A PostgreSQL before 17. */
  postgresOld: ServerState;
  mariadb: ServerState;
  /** MySQL 8.0.36 or newer. */
  mysql: ServerState;
}

export type ServerName = keyof Servers;

declare module "vitest" {
  interface ProvidedContext extends Servers {
    /** Where a test picks at random, it starts from this. */
    seed: number;
  }
}

export const TEMPLATE = "holdfast_template";

const oldPackage: DebianPackage = { name: "postgresql", installed: () => oldBinaries() !== undefined };

// Tests make and drop hundreds of databases; none of them has to outlive the machine's power.
const POSTGRES_SETTINGS = {
  fsync: "off",
  full_page_writes: "off",
  synchronous_commit: "on",
  log_lock_waits: "off",
  max_connections: "400",
  max_prepared_transactions: "10",
};

export default async function setup(project: TestProject): Promise<() => Promise<void>> {
  const seed = Number(process.env["HOLDFAST_SEED"] ?? randomInt(2 ** 31));
  if (!Number.isSafeInteger(seed)) throw new Error("HOLDFAST_SEED must be an integer");
  console.log(`HOLDFAST_SEED=${seed}`);
  project.provide("seed", seed);

  const stops: (() => Promise<void>)[] = [];
  const stopAll = async (): Promise<void> => {
    // The newest first: PgBouncer before the server it talks to.
    for (const stop of stops.toReversed()) await stop();
  };
  const failures: string[] = [];
  const wanted = process.env["HOLDFAST_SERVERS"]?.split(",");

  const provide = async (name: ServerName, start: () => Promise<StartedServer>) => {
    let state: ServerState;
    if (wanted && !wanted.includes(name)) {
      state = { unavailable: "HOLDFAST_SERVERS leaves it out" };
    } else {
      try {
        const { url, stop } = await start();
        stops.push(stop);
        state = { url };
      } catch (error) {
        state = { unavailable: error instanceof Error ? error.message : String(error) };
      }
    }
    if ("unavailable" in state) failures.push(`${name} is not available: ${state.unavailable}`);
    project.provide(name, state);
  };

  const installed = wanted
    ? Promise.resolve()
    : installMissing([
        pgbouncerPackage,
        pgpoolPackage,
        mariadbPackage,
        oldPackage,
        debootstrapPackage,
        prometheusPackage,
        ...patroniPackages,
        psycopgPackage,
      ]);
  let postgres: EmbeddedPostgres | undefined;
  const startPostgres18 = async () => {
    postgres = await startPostgres({ settings: POSTGRES_SETTINGS });
    return withTemplate(postgres);
  };
  await Promise.all([
    bundleLibrary(),
    provide("postgres", startPostgres18).then(() =>
      provide("pgbouncer", async () => {
        await installed;
        if (!postgres) throw new Error("there is no postgres to put behind it");
        return startPgbouncer(postgres);
      }),
    ),
    provide("mariadb", async () => {
      await installed;
      return startMariadb();
    }),
    provide("mysql", async () => {
      await installed;
      return startMysql();
    }),
    provide("postgresOld", async () => {
      await installed;
      const binDir = oldBinaries();
      if (binDir === undefined) throw new Error(`there is no PostgreSQL before 17 in ${OLD_HOME}`);
      return withTemplate(await startPostgres({ binDir, settings: POSTGRES_SETTINGS }));
    }),
  ]);

  await installed;
  for (const missing of [noPromtool(), noPatroni(), noPgpool()])
    if (missing !== undefined) failures.push(missing);

  for (const failure of failures) console.log(failure);
  if (process.env["CI"] && failures.length > 0) {
    await stopAll();
    throw new Error(`In CI every server has to be there.\n${failures.join("\n")}`);
  }
  return stopAll;
}

async function withTemplate(server: EmbeddedPostgres): Promise<StartedServer> {
  await server.createDatabase(TEMPLATE);
  return { url: server.url(), stop: server.stop };
}
