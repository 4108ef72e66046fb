import { checkRows, checkText, optionalText } from "../input/values.ts";
import type { Connection } from "../seam/database.ts";
import { merged } from "../shards/merged.ts";
import { checkNames } from "../input/options.ts";
import type { How, Soon } from "../seam/store.ts";
import { instancesOf } from "../shards/shards.ts";
import { quotaBatcherOf } from "./batcher.ts";
import { textOf } from "./checks.ts";
import type { QuotaInfo, QuotaLists, StoredBucket } from "./store.ts";
import type { Subject } from "./types.ts";

/** What is stored for a subject. Windows and limits of the code are not: `peek` knows how it stands by now. */
export interface SubjectInfo extends Omit<StoredBucket, "since"> {
  /** When what `used` counts began; undefined: it has no window, or nothing was used since the last reset. */
  readonly since: Date | undefined;
}

/** All quotas that have a subject, by name. */
export async function quotas(hf: object): Promise<readonly QuotaInfo[]> {
  const found = await eachOf(hf, (connection, lists, how) => lists.names(connection, how));
  return merged(
    found,
    ({ name }) => name,
    (a, b) => ({ ...a, subjects: a.subjects + b.subjects }),
  );
}

async function eachOf<T>(
  hf: object,
  ask: (connection: Connection, lists: QuotaLists<Connection>, how: How) => Soon<readonly T[]>,
): Promise<readonly T[][]> {
  return Promise.all(
    instancesOf(hf, "quota").all.map(async (instance) => {
      const batcher = quotaBatcherOf(instance);
      const { found } = await batcher.alone(
        undefined,
        async (connection, _, how) => ({ found: await ask(connection, batcher.store.lists, how) }),
        { names: ["quotas"] },
      );
      return [...found];
    }),
  );
}

/** Subjects of a quota, by their text: a page after this one, or these, as far as they are there. */
export async function subjects(
  hf: object,
  quota: string,
  options: { readonly after?: string; readonly limit?: number; readonly of?: readonly Subject[] } = {},
): Promise<readonly SubjectInfo[]> {
  checkNames("subjects", options, new Set(["after", "limit", "of"]));
  const { after, limit = 100, of } = options;
  checkText("subjects", "quota", quota, { empty: true });
  optionalText("subjects", "after", after);
  checkRows("subjects", "limit", limit, 10_000);
  const which = { after, most: limit, of: of?.map(textOf) };
  const pages = await eachOf(hf, (connection, lists, how) => lists.subjects(connection, quota, which, how));
  const found = merged(pages, ({ subject }) => subject);
  // Those that were asked for by name are all of them.
  return (of ? found : found.slice(0, limit)).map(({ since, ...rest }) => ({
    ...rest,
    since: since === undefined ? undefined : new Date(since),
  }));
}
