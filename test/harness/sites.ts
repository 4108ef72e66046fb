/** Backends by name, for tests and for the processes that they start: nothing here needs the test runner. */
import { type Holdfast, type HoldfastOptions, holdfast, sql } from "holdfast";
import type { ConformanceSite } from "holdfast/testing";
import { backendNamed } from "../backends.ts";

export interface Site extends Pick<ConformanceSite, "database" | "close"> {
  readonly hf: Holdfast<unknown>;
}

/** As SQLite is if nobody asks for anything else. */
export const withoutWal = "better-sqlite3 without WAL";

export const serverOf = (name: string) => backendNamed(name === withoutWal ? "better-sqlite3" : name).server;

async function openSqlite(url: string): Promise<Pick<Site, "database" | "close">> {
  const [{ default: Database }, { fromBetterSqlite3 }] = await Promise.all([
    import("better-sqlite3"),
    import("holdfast/better-sqlite3"),
  ]);
  return { database: fromBetterSqlite3(() => new Database(url)), close: async () => {} };
}

export async function openNamed(
  name: string,
  url: string,
  options: Pick<HoldfastOptions, "isolation"> = {},
): Promise<Site> {
  const site = name === withoutWal ? await openSqlite(url) : await backendNamed(name).open(url);
  // Many wait for each other here, the machine may be busy, and bodies take their time on purpose.
  const hf: Holdfast<unknown> = holdfast(site.database, { wait: 60_000, hazards: "off", ...options });
  return {
    hf,
    database: site.database,
    async close() {
      await hf.close();
      await site.close();
    },
  };
}

/** A table of ours, where this backend has it. */
export const ourTable = (backend: string, name: string) =>
  serverOf(backend).startsWith("postgres") ? sql.id("holdfast", name) : sql.id(`holdfast_${name}`);

/** A moment in a table of ours. */
export const microseconds = (backend: string, ...column: string[]) =>
  serverOf(backend).startsWith("postgres")
    ? sql`(extract(epoch FROM ${sql.id(...column)}) * 1000000)::float8`
    : sql`${sql.id(...column)}`;

/** Some servers and clients read it by themselves. */
export const json = (sent: unknown): unknown =>
  typeof sent === "string" || sent instanceof Uint8Array
    ? (JSON.parse(Buffer.from(sent as string).toString()) as unknown)
    : (sent ?? null);
