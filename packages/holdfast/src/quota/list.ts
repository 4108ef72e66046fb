import { checkRows, checkText, optionalText } from "../core/input.ts";
import { checkNames } from "../core/options.ts";
import type { QuotaInfo, StoredBucket } from "../core/quotas.ts";
import { deskOf } from "./desk.ts";
import { type Subject, textOf } from "./quota.ts";

/** What is stored for a subject. Windows and limits of the code are not: `peek` knows how it stands by now. */
export interface SubjectInfo extends Omit<StoredBucket, "since"> {
  /** When what `used` counts began; undefined: it has no window, or nothing was used since the last reset. */
  readonly since: Date | undefined;
}

/** All quotas that have a subject, by name. */
export async function quotas(hf: object): Promise<readonly QuotaInfo[]> {
  const desk = deskOf(hf);
  const { found } = await desk.alone(undefined, async (connection) => ({
    found: await desk.store.names(connection),
  }));
  return found;
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
  const desk = deskOf(hf);
  const { found } = await desk.alone(undefined, async (connection) => ({
    found: await desk.store.stored(connection, quota, which),
  }));
  return found.map(({ since, ...rest }) => ({
    ...rest,
    since: since === undefined ? undefined : new Date(since),
  }));
}
