/** The tables of quotas as they are on a server, as rows that decisions read and write; and a view of them as a store reads it. */
import type { Pool } from "pg";
import type {
  BucketRow,
  BucketView,
  GrantRow,
  HoldRow,
  LineRow,
  QuotaNeed,
  QuotaWrites,
} from "../../../packages/holdfast/src/quota/decide/rows.ts";
import { leftOf, never } from "../../../packages/holdfast/src/quota/decide/rows.ts";
import { countedKinds, counts, endsCount } from "../../../packages/holdfast/src/quota/decide/windows.ts";
import type { Rule } from "../../../packages/holdfast/src/quota/store.ts";

export interface State {
  readonly buckets: readonly BucketRow[];
  readonly lines: readonly LineRow[];
  readonly holds: readonly HoldRow[];
  readonly grants: readonly GrantRow[];
}

export const nothing: State = { buckets: [], lines: [], holds: [], grants: [] };

const moment = (column: string) =>
  `CASE WHEN ${column} = 'infinity' THEN ${never} ELSE (extract(epoch FROM ${column}) * 1000000)::bigint END AS ${column}`;

const numbers = new Set(
  "id used held credit version reset since own_limit rolled moves moved_to moved_from bucket amount delta forgotten refunded max at first until spent priority".split(
    " ",
  ),
);

/** Without anything of the stores, so that it cannot be wrong in the same way. */
export async function readState(pool: Pick<Pool, "query">): Promise<State> {
  const read = async (text: string, texts: readonly string[]) => {
    const { rows } = await pool.query<Record<string, unknown>>(text);
    return rows.map((row) =>
      Object.fromEntries(
        Object.entries(row).map(([column, value]) => {
          if (value === null) return [column, undefined];
          return [column, numbers.has(column) && !texts.includes(column) ? Number(value) : value];
        }),
      ),
    );
  };
  return {
    buckets: (await read(
      `SELECT id, quota, subject, used, held, credit, version, reset, ${moment("since")}, to_json(parts) AS parts, own_limit, plan, rolled, moves, moved_to, moved_from
  FROM holdfast.quota_bucket ORDER BY id`,
      [],
    )) as unknown as BucketRow[],
    lines: (await read(
      `SELECT bucket, version, kind, id, entry, amount, delta, forgotten, refunded, used, held, credit, max, ${moment("since")},
  ${moment("at")}, first, drains, details FROM holdfast.quota_line ORDER BY bucket, version`,
      ["id"],
    )) as unknown as LineRow[],
    holds: (await read(
      `SELECT quota, subject, id, amount, ${moment("until")} FROM holdfast.quota_hold ORDER BY quota, subject, id`,
      ["id"],
    )) as unknown as HoldRow[],
    grants: (await read(
      `SELECT quota, subject, id, amount, spent, priority, ${moment("until")} FROM holdfast.quota_grant ORDER BY quota, subject, id`,
      ["id"],
    )) as unknown as GrantRow[],
  };
}

interface Named {
  readonly quota: string;
  readonly subject: string;
}

const isOf =
  ({ quota, subject }: Named) =>
  (row: Named) =>
    row.quota === quota && row.subject === subject;

export interface Wanted extends Named {
  readonly rule: Rule;
  readonly ids: readonly string[];
  readonly holds: readonly string[];
  readonly allGrants: boolean;
}

/** What a store reads of a bucket, and no more: what a decision needs besides, it has to ask for. */
export class Reader {
  readonly #state: State;
  readonly #wanted: readonly Wanted[];
  readonly #now: number;
  readonly buckets: BucketView[];

  constructor(state: State, wanted: readonly Wanted[], now: number) {
    this.#state = state;
    this.#wanted = wanted;
    this.#now = now;
    this.buckets = wanted.map((each) => {
      const row = state.buckets.find(isOf(each));
      if (!row) throw new Error(`there is no bucket of ${each.quota}:${each.subject}`);
      return { row };
    });
  }

  read({ what, buckets }: QuotaNeed): void {
    for (const place of buckets) this.buckets[place] = { ...this.#view(place), ...this.#more(place, what) };
  }

  #view(place: number): BucketView {
    return this.buckets[place] as BucketView;
  }

  #more(place: number, what: QuotaNeed["what"]): Partial<BucketView> {
    const { row } = this.#view(place);
    const { rule, ids, holds: held, allGrants } = this.#wanted[place] as Wanted;
    const { lines, holds, grants } = this.#state;
    const now = this.#now;
    const own = lines.filter(({ bucket }) => bucket === row.id);
    const per = "per" in rule ? rule.per : 0;
    switch (what) {
      case "lines":
        return { lines: new Map(own.filter(({ id }) => ids.includes(id)).map((line) => [line.id, line])) };
      case "holds":
        return {
          holds: holds.filter(isOf(row)).filter(({ until, id }) => until <= now || held.includes(id)),
        };
      case "grants":
        return {
          grants: grants
            .filter(isOf(row))
            .filter(({ until, spent, amount }) => allGrants || until <= now || spent < amount),
        };
      case "counted":
        return { counted: counts(own.toReversed(), per, now) };
      case "uses": {
        const from = own.findLastIndex((line) => endsCount(line, per, now)) + 1;
        const counted = own.slice(from).filter(({ kind }) => countedKinds.includes(kind));
        return { uses: counted.map((line) => ({ at: line.at, left: leftOf(line) })) };
      }
    }
  }
}

/** Runs a decision as a store does: reads what it needs, until it is made. */
export function decided<T extends object>(
  reader: Reader,
  decide: (buckets: readonly BucketView[]) => T | { readonly need: QuotaNeed },
): T {
  for (let i = 0; i < 10; i++) {
    const found = decide(reader.buckets);
    if (!("need" in found)) return found;
    reader.read(found.need);
  }
  throw new Error("a decision asks for more and more");
}

const sameKey = (a: Named & { id: string }) => (b: Named & { id: string }) => isOf(a)(b) && a.id === b.id;

/** Undefined: an id, or a version, is there already, of a line, a hold or a grant. */
export function applied(state: State, { buckets, lines, holds, grants }: QuotaWrites): State | undefined {
  const refunded = state.lines.map((line) => {
    const update = lines.update.find((each) => each.bucket === line.bucket && each.version === line.version);
    return update ? { ...line, refunded: update.refunded } : line;
  });
  const all = [...refunded, ...lines.insert];
  if (new Set(all.map(({ bucket, id }) => `${bucket}:${id}`)).size < all.length) return undefined;
  if (new Set(all.map(({ bucket, version }) => `${bucket}:${version}`)).size < all.length) return undefined;
  const taken = <T extends Named & { id: string }>(
    rows: readonly T[],
    gone: readonly (Named & { id: string })[],
    more: readonly T[],
  ) => more.some((row) => rows.some(sameKey(row)) && !gone.some(sameKey(row)));
  if (taken(state.holds, holds.delete, holds.insert) || taken(state.grants, grants.delete, grants.insert))
    return undefined;
  return sorted({
    buckets: state.buckets.map((row) => buckets.update.find(isOf(row)) ?? row),
    lines: all,
    holds: [...state.holds.filter((row) => !holds.delete.some(sameKey(row))), ...holds.insert],
    grants: [
      ...state.grants
        .filter((row) => !grants.delete.some(sameKey(row)))
        .map((row) => ({ ...row, spent: grants.update.find(sameKey(row))?.spent ?? row.spent })),
      ...grants.insert,
    ],
  });
}

export function sorted({ buckets, lines, holds, grants }: State): State {
  const byName = (a: Named & { id?: unknown }, b: Named & { id?: unknown }) =>
    Buffer.compare(Buffer.from(nameOf(a)), Buffer.from(nameOf(b)));
  return {
    buckets: buckets.toSorted((a, b) => a.id - b.id),
    lines: lines.toSorted((a, b) => a.bucket - b.bucket || a.version - b.version),
    holds: holds.toSorted(byName),
    grants: grants.toSorted(byName),
  };
}

const nameOf = ({ quota, subject, id }: Named & { id?: unknown }) => [quota, subject, String(id)].join("\0");
