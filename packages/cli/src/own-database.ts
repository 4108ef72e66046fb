/**
 * A database of our own on somebody's server, or a schema where the user may not create one. Its name says whose it is
 * and that it can go; it is removed at the end, also after Ctrl-C; and what a killed run has left is found by the next.
 */
import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { failureOf } from "holdfast";
import { confirmed } from "./confirm.ts";
import { describe } from "./describe.ts";
import type { Server } from "./server.ts";
import { note } from "./terminal.ts";

export type OwnKind = "database" | "schema";
/** The verb that makes it. */
export type OwnVerb = "bench" | "race";

export interface Own {
  readonly what: OwnKind;
  readonly name: string;
}

const prefixOf = (verb: OwnVerb): string => `holdfast_${verb}_`;

export function quoted(server: Server, name: string): string {
  return server.kind === "postgres" ? `"${name.replaceAll('"', '""')}"` : `\`${name.replaceAll("`", "``")}\``;
}

async function drop(server: Server, { what, name }: Own, force: boolean): Promise<void> {
  const id = quoted(server, name);
  if (what === "schema") await server.run(`DROP SCHEMA IF EXISTS ${id} CASCADE`);
  else
    await server.run(
      `DROP DATABASE IF EXISTS ${id}${force && server.kind === "postgres" ? " WITH (FORCE)" : ""}`,
    );
}

/**
 * Makes an empty database of PostgreSQL that nobody else may connect to: before PostgreSQL 15 everybody may make functions in a new one,
 * which whoever works there would call. Not from template1, which may be in use by somebody.
 */
export async function createEmpty({ run }: Server, name: string): Promise<void> {
  await run(`CREATE DATABASE "${name}" TEMPLATE template0 ALLOW_CONNECTIONS false`);
  await run(`REVOKE ALL ON DATABASE "${name}" FROM PUBLIC`);
  await run(`ALTER DATABASE "${name}" ALLOW_CONNECTIONS true`);
}

/** By hand. */
export function dropStatement({ what, name }: Own): string {
  return what === "schema" ? `DROP SCHEMA ${name} CASCADE` : `DROP DATABASE ${name}`;
}

/** For a server that is just starting again. */
const patienceMs = 15_000;

function isAway(error: unknown): boolean {
  const { code } = error as { code?: unknown };
  // Starting up, or nobody listens yet.
  return code === "57P03" || code === "ECONNREFUSED" || failureOf(error)?.kind === "lost";
}

/** One that is to be made. */
export class OwnDatabase implements Own, AsyncDisposable {
  readonly what: OwnKind;
  readonly name: string;
  readonly #server: Server;
  readonly #left: (own: Own, why: string) => void;
  /** The second Ctrl-C ends the process at once. */
  readonly #onExit = (): void => this.#left(this, "it was stopped before that");
  #there = false;

  /** `left` is told if it could not be removed, also if the process ends before it was. */
  constructor(server: Server, verb: OwnVerb, what: OwnKind, left: (own: Own, why: string) => void) {
    this.#server = server;
    this.what = what;
    this.name = `${prefixOf(verb)}${randomBytes(6).toString("hex")}`;
    this.#left = left;
  }

  /** Whether it is there, as far as is known. */
  get there(): boolean {
    return this.#there;
  }

  /** Runs what makes it. If the server refuses that, there is nothing to be removed. */
  async make<T>(work: () => Promise<T>): Promise<T> {
    this.#there = true;
    process.once("exit", this.#onExit);
    try {
      return await work();
    } catch (error) {
      // It may have been made, if the answer was lost.
      if (!isAway(error)) this.#gone();
      throw error;
    }
  }

  #gone(): void {
    this.#there = false;
    process.off("exit", this.#onExit);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (!this.#there) return;
    for (const since = performance.now(); ;) {
      try {
        await drop(this.#server, this, true);
        break;
      } catch (error) {
        if (isAway(error) && performance.now() - since < patienceMs) await sleep(500);
        else {
          this.#left(this, describe(error));
          break;
        }
      }
    }
    this.#gone();
  }
}

/** Those of runs that were killed: in which nobody is. */
export async function leftovers(server: Server, verb: OwnVerb): Promise<Own[]> {
  const first = await unused(server, verb);
  if (first.length === 0 || server.kind !== "postgres") return first;
  // Between its making and the first session in it a database looks like one that was left.
  await sleep(300);
  const still = new Set((await unused(server, verb)).map(({ name }) => name));
  return first.filter(({ name }) => still.has(name));
}

async function unused(server: Server, verb: OwnVerb): Promise<Own[]> {
  const like = `${prefixOf(verb)}%`;
  const rows =
    server.kind === "postgres"
      ? await server.query(
          `SELECT 'database' AS what, datname AS name FROM pg_database d
              WHERE datname LIKE $1 AND pg_has_role(datdba, 'MEMBER')
                AND NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.datid = d.oid)
            UNION ALL SELECT 'schema', nspname FROM pg_namespace
              WHERE nspname LIKE $1 AND pg_has_role(nspowner, 'MEMBER')
                AND NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.application_name = nspname)
            ORDER BY name`,
          [like],
        )
      : await server.query(
          `SELECT 'database' AS what, schema_name AS name FROM information_schema.schemata
            WHERE schema_name LIKE ? AND IS_FREE_LOCK(schema_name) = 1 ORDER BY schema_name`,
          [like],
        );
  const pattern = new RegExp(`^${prefixOf(verb)}[0-9a-f]{12}$`);
  return rows
    .map((row) => ({ what: row["what"] as OwnKind, name: String(row["name"]) }))
    .filter(({ name }) => pattern.test(name));
}

/** Asks whether what runs left behind that were killed is to go. Returns the names of what has gone. */
export async function tidy(
  server: Server,
  found: readonly Own[],
  yes: boolean | undefined,
): Promise<string[]> {
  if (found.length === 0) return [];
  const names = found.map(({ what, name }) => `the ${what} ${name}`).join(", ");
  const question = `An earlier run was killed, and left ${names} on ${server.shown}. Remove it?`;
  if (!(await confirmed(question, yes))) return [];
  const removed: string[] = [];
  for (const each of found) {
    try {
      // Not by force: somebody who is in it after all keeps it.
      await drop(server, each, false);
      removed.push(each.name);
      note(`Removed ${each.name}, which an earlier run had left.`);
    } catch (error) {
      note(`Could not remove ${each.name}: ${describe(error)}`);
    }
  }
  return removed;
}
