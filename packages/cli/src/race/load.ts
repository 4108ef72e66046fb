/** A module's exports as scenarios. */
import { existsSync, statSync } from "node:fs";
import { basename, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { types } from "node:util";
import type { Scenario } from "holdfast/testing";
import { describe } from "../describe.ts";

import { Failure } from "../failure.ts";

export interface RaceContext {
  /** The database that the scenario is to use. DATABASE_URL says the same. */
  readonly url: string;
  /** The same, by way of the proxy: for an application in another process. With --proxy. */
  readonly proxy?: string;
}

/** What a file for `holdfast race` exports. */
export interface RaceScenario extends Scenario {
  /** Default: the name of the export. */
  readonly name?: string;
  /** It has made the database of `db` for itself, so that whatever is in it may be changed. */
  readonly ownDatabase?: boolean;
  /** Called at the end: closes clients, drops tables. */
  readonly close?: () => Promise<unknown>;
}

/** Or a function that makes it, on the database that it is given. */
export type RaceFactory = (context: RaceContext) => RaceScenario | Promise<RaceScenario>;

/** One export. */
export interface Entry {
  /** How it is called in `--only`. */
  readonly key: string;
  readonly title: string;
  readonly source: RaceScenario | RaceFactory;
}

export const example = `export const quota = ({ url }) => {
  const pool = new Pool({ connectionString: url });
  const [actors, invariant] = [{ A: () => upload(pool), B: () => upload(pool) }, () => mustFit(pool)];
  return { db: fromPg(pool), actors, invariant, close: () => pool.end() };
};`;

/** Before anything is made for it. */
export function checkFile(file: string): void {
  const path = resolve(file);
  if (!existsSync(path) || !statSync(path).isFile()) throw new Failure(`There is no file ${file}.`);
}

export async function load(file: string): Promise<Entry[]> {
  const path = resolve(file);
  const entries = entriesOf(await exportsOf(file, path), basename(path));
  if (entries.length === 0)
    throw new Failure(
      `${file} exports no scenario. Expected is an object with \`actors\` and \`invariant\`, or a function that makes one:\n\n${example}\n`,
    );
  return entries;
}

async function exportsOf(file: string, path: string): Promise<Readonly<Record<string, unknown>>> {
  try {
    return await import(pathToFileURL(path).href);
  } catch (error) {
    throw new Failure(`${file} could not be loaded: ${whyNot(error)}`, { cause: error });
  }
}

function whyNot(error: unknown): string {
  if (!types.isNativeError(error)) return describe(error);
  const { code } = error as NodeJS.ErrnoException;
  if (code === "ERR_UNKNOWN_FILE_EXTENSION")
    return `${error.message} (TypeScript takes Node 22.18 or newer; this is ${process.version})`;
  // Only its stack says where.
  return error instanceof SyntaxError ? (error.stack ?? error.message) : error.message;
}

function entriesOf(exports: Readonly<Record<string, unknown>>, file: string): Entry[] {
  const seen = new Set<unknown>();
  return Object.entries(exports).flatMap(([key, source]) => {
    // What is also the default export, as every module of CommonJS has one.
    if (seen.has(source) || !(isScenario(source) || mayMakeOne(source))) return [];
    seen.add(source);
    const title = (isScenario(source) ? source.name : undefined) ?? (key === "default" ? file : key);
    return [{ key, title, source }];
  });
}

export function isScenario(value: unknown): value is RaceScenario {
  if (typeof value !== "object" || value === null) return false;
  const { actors, invariant } = value as Partial<RaceScenario>;
  return typeof actors === "object" && actors !== null && typeof invariant === "function";
}

/** Helpers may be exported too: what takes more than the context is one of these, and so is a class. */
function mayMakeOne(value: unknown): value is RaceFactory {
  return typeof value === "function" && value.length <= 1 && !/^class\b/.test(String(value));
}

/** What was asked for with `--only`, by the names of exports and by their own. */
export class Wanted {
  readonly #names: readonly string[] | undefined;
  readonly #missing: Set<string>;

  constructor(names: readonly string[] | undefined) {
    this.#names = names;
    this.#missing = new Set(names);
  }

  /** Functions tell their own name only when they are called, and are only called if need be. */
  among(entries: readonly Entry[]): Entry[] {
    if (!this.#names) return [...entries];
    const named = entries.filter(({ key, title }) => this.has(key, title));
    if (this.#missing.size === 0) return named;
    return entries.filter((entry) => named.includes(entry) || typeof entry.source === "function");
  }

  has(key: string, title: string): boolean {
    if (!this.#names) return true;
    for (const name of [key, title]) this.#missing.delete(name);
    return this.#names.includes(key) || this.#names.includes(title);
  }

  /** Names that nothing has. */
  get missing(): readonly string[] {
    return [...this.#missing];
  }
}
