/**
 * Quotas on any engine that has a dialect: what `quota/decide` decides, on rows that are read and written here. The same
 * tables, at the same time, as an engine's own functions.
 */
import type { SqlConnection } from "../../../seam/database.ts";
import { sql } from "../../../seam/sql.ts";
import type { How } from "../../../seam/store.ts";
import { decideAmendment, standingNow } from "../../../quota/decide/amend.ts";
import { type LookForIds, type UsesView, decideUses } from "../../../quota/decide/consume.ts";
import type { BucketView, QuotaNeed, QuotaWrites } from "../../../quota/decide/rows.ts";
import type {
  Amended,
  Amendment,
  Elsewhere,
  UseBatch,
  Late,
  Quotas,
  Rule,
  Verdicts,
} from "../../../quota/store.ts";
import { RowsAtOnce } from "../at-once.ts";
import type { StoreDialect } from "../dialect.ts";
import { type ExchangeDecided, type StoreExchange, Exchanges, RepeatedIds } from "../exchange.ts";
import { inOneCall } from "../one-call.ts";
import { quotaLists } from "./lists.ts";
import { quotaMoves } from "./moves.ts";
import { type NamedBucket, QuotaRows, compareNamed, counted, nameOf } from "./rows.ts";
import { quotaBuckets, quotaLines } from "./tables.ts";
import { quotaUpkeep } from "./upkeep.ts";

export function quotaStore<C extends SqlConnection>(dialect: StoreDialect<C>): Quotas<C> {
  const rows = new QuotaRows(dialect);
  const exchanges = new Exchanges(dialect);
  const repeated = new RepeatedIds(dialect);

  /** In the caller's transaction an id that is taken must be found before it is written: the failure would be the transaction's. */
  const lookOf = (named: boolean, { free }: How): LookForIds =>
    !free || (named && repeated.lately) ? true : named && "refused";

  return {
    async consume(connection, batch: UseBatch, how): Promise<Verdicts> {
      const done =
        repeated.lately || !arePlain(batch, how)
          ? undefined
          : await repeated.noting(
              connection,
              usesAtOnce(rows, connection, batch, how) ?? usesInOneCall(rows, exchanges, connection, batch),
            );
      if (done) return done;
      const wanted = batch.buckets.map(({ quota, subject, definition }) => ({
        quota,
        subject,
        rule: batch.definitions[definition]?.rule ?? { window: "none" as const },
        ids: [] as string[],
        holds: [] as string[],
        allGrants: false,
      }));
      for (const { bucket, id, holdMs } of batch.uses) {
        wanted[bucket]?.ids.push(id);
        if (holdMs !== undefined) wanted[bucket]?.holds.push(id);
      }
      const decide = (view: UsesView, look: LookForIds) => decideUses(view, { ...batch, look });
      const question = { wanted, free: how.free, look: lookOf(batch.look, how), repeated, decide };
      return exchanges.run(connection, how, new QuotaExchange(rows, connection, question));
    },

    amend(connection, amendment: Amendment, how): Promise<Amended | Elsewhere | Late> {
      const { bucket, definition, id } = amendment;
      const about = "of" in amendment ? amendment.of : undefined;
      const ids = about === undefined ? [id] : [id, about];
      const holds = about === undefined ? [] : [about];
      const wanted = [{ ...bucket, rule: definition.rule, ids, holds, allGrants: true }];
      const decide = ({ now, buckets: [first] }: UsesView) =>
        decideAmendment({ now, bucket: first as BucketView }, amendment);
      const question = { wanted, free: how.free, look: true, decide };
      return exchanges.run(connection, how, new QuotaExchange(rows, connection, question));
    },

    async peek(connection, definition, bucket) {
      const row = await rows.bucket(connection, bucket);
      const now = await rows.rows.clock(connection);
      const { rule } = definition;
      const counted =
        rule.window === "log" && row
          ? await rows.counted(connection, row.id, { per: rule.per, now }, false)
          : 0;
      const sums = await rows.sums(connection, bucket, now, false);
      return standingNow({ now, row, ...sums, counted }, definition, bucket);
    },

    lists: quotaLists(rows),
    upkeep: quotaUpkeep(rows),
    moves: quotaMoves(rows),
  };
}

/** Uses as most are: only of what is in the rows of buckets, if nothing is held there and there are no credits. */
const arePlain = ({ definitions, uses }: UseBatch, { free }: How): boolean =>
  free &&
  definitions.every(({ rule }) => rule.window !== "log") &&
  uses.every(({ holdMs }) => holdMs === undefined);

/** Plain uses of buckets that are there, and with room. Undefined: they are not, or have to be waited for. */
function usesAtOnce<C extends SqlConnection>(
  { rows }: QuotaRows<C>,
  connection: C,
  batch: UseBatch,
  { waitMs }: How,
): Promise<Verdicts | undefined> | undefined {
  const { buckets } = batch;
  return rows.dialect.atOnce?.(connection, waitMs, (at) => {
    const tables = new RowsAtOnce(at, rows);
    const views: BucketView[] = [];
    for (const { quota, subject } of buckets) {
      const row = tables.find(quotaBuckets, [quota, subject]);
      if (!row || row.held > 0 || row.credit > 0) return undefined;
      views.push({ row });
    }
    const decided = decideUses(
      { now: tables.now(), buckets: views },
      { ...batch, look: batch.look && "refused" },
    );
    if ("need" in decided) return undefined;
    const { verdicts, writes } = decided;
    for (const bucket of writes.buckets.update) {
      const { quota, subject, ...set } = counted(bucket);
      tables.update(quotaBuckets, [quota, subject], set);
    }
    tables.insert(quotaLines, writes.lines.insert);
    return verdicts;
  });
}

/** The same where a message takes its time. */
function usesInOneCall<C extends SqlConnection>(
  { rows }: QuotaRows<C>,
  exchanges: Exchanges<C>,
  connection: C,
  batch: UseBatch,
): Promise<Verdicts | undefined> {
  const { definitions, buckets } = batch;
  return inOneCall(rows, exchanges, connection, {
    of: quotaBuckets,
    into: quotaLines,
    compared: ({ version }) => ({ version }),
    set(row) {
      const { quota: _quota, subject: _subject, ...set } = counted(row);
      return set;
    },
    names: buckets.map(nameOf),
    nameOf,
    where: rows.matching(
      quotaBuckets,
      buckets.map(({ quota, subject }) => ({ quota, subject })),
    ),
    decide(found, now) {
      const known = new Map(found.map((row) => [nameOf(row), row]));
      const views = buckets.flatMap((bucket) => {
        const row = known.get(nameOf(bucket));
        return row && row.held === 0 && row.credit === 0 ? [{ row }] : [];
      });
      if (views.length < buckets.length) return undefined;
      const decided = decideUses({ now, buckets: views }, { ...batch, look: batch.look && "refused" });
      if ("need" in decided) return undefined;
      const { verdicts, writes } = decided;
      const ends = definitions.flatMap(({ rule }) => endOf(rule, now) ?? []);
      return {
        answer: verdicts,
        changed: writes.buckets.update.map((after) => ({
          before: known.get(nameOf(after)) as typeof after,
          after,
        })),
        added: writes.lines.insert,
        until: ends.length > 0 ? Math.min(...ends) : undefined,
      };
    },
  });
}

/** When the window is over that a moment is in: then it would be decided otherwise. */
const endOf = (rule: Rule, now: number): number | undefined =>
  rule.window === "fixed" ? rule.starts.map((ms) => ms * 1000).find((start) => start > now) : undefined;

interface Wanted extends NamedBucket {
  readonly rule: Rule;
  /** Lines with these may be there already, or are what it is about. */
  readonly ids: readonly string[];
  /** Holds with these may be there already, or are what it is about. */
  readonly holds: readonly string[];
  /** Also those that are spent. */
  readonly allGrants: boolean;
}

interface Question<Answer> {
  readonly wanted: readonly Wanted[];
  /** Outside of transactions of others. */
  readonly free: boolean;
  /** `true`: ids are looked for at once. */
  readonly look: LookForIds;
  /** Is told of what could not be written. */
  readonly repeated?: RepeatedIds;
  decide(view: UsesView, look: LookForIds): ExchangeDecided<QuotaNeed, Answer, QuotaWrites>;
}

/** One decision about some buckets. */
class QuotaExchange<C extends SqlConnection, Answer> implements StoreExchange<
  UsesView,
  QuotaNeed,
  Answer,
  QuotaWrites
> {
  readonly names: readonly string[];
  readonly #rows: QuotaRows<C>;
  readonly #connection: C;
  readonly #question: Question<Answer>;
  /** An id that is taken may be why something could not be written. */
  #look: LookForIds;
  #now = 0;
  #views: BucketView[] = [];

  constructor(rows: QuotaRows<C>, connection: C, question: Question<Answer>) {
    this.#rows = rows;
    this.#connection = connection;
    this.#question = question;
    this.#look = question.look;
    this.names = question.wanted.map(nameOf);
  }

  decide(view: UsesView): ExchangeDecided<QuotaNeed, Answer, QuotaWrites> {
    return this.#question.decide(view, this.#look);
  }

  async read(locked: boolean, needs: readonly QuotaNeed[]): Promise<UsesView> {
    const newest = needs.at(-1);
    if (!newest) await this.#begin(locked);
    else if (newest.what === "lines") await this.#addLines(locked);
    else for (const place of newest.buckets) await this.#add(place, newest.what, locked);
    return { now: this.#now, buckets: this.#views };
  }

  async #begin(locked: boolean): Promise<void> {
    const { wanted, free, look, repeated } = this.#question;
    if (this.#look !== look) repeated?.note();
    const moments: number[] = [];
    const how = locked && (free ? "apart" : "in turn");
    const buckets = await this.#rows.buckets(this.#connection, wanted, how, moments);
    this.#now = await this.#rows.rows.clockAfter(this.#connection, moments);
    this.#views = buckets.map((row) => ({ row }));
    if (this.#look === true) await this.#addLines(locked);
    for (const [place, { rule }] of wanted.entries())
      if (rule.window === "log") await this.#add(place, "counted", locked);
  }

  async #addLines(locked: boolean): Promise<void> {
    const ids = this.#question.wanted.flatMap((each, place) =>
      each.ids.map((id) => ({ bucket: this.#view(place).row.id, id })),
    );
    const found = await this.#rows.lines(this.#connection, ids, locked);
    this.#views = this.#views.map((view) => ({ ...view, lines: found.get(view.row.id) ?? new Map() }));
  }

  async #add(place: number, what: Exclude<QuotaNeed["what"], "lines">, locked: boolean): Promise<void> {
    const view = this.#view(place);
    const { rule, holds: ids, allGrants: all } = this.#question.wanted[place] as Wanted;
    const [connection, rows, now] = [this.#connection, this.#rows, this.#now];
    const per = rule.window === "log" ? rule.per : 0;
    const more = {
      holds: async () => ({ holds: await rows.holds(connection, view.row, { now, ids }, locked) }),
      grants: async () => ({ grants: await rows.grants(connection, view.row, { now, all }, locked) }),
      counted: async () => ({ counted: await rows.counted(connection, view.row.id, { per, now }, locked) }),
      uses: async () => ({ uses: await rows.uses(connection, view.row.id, { per, now }, locked) }),
    };
    this.#views[place] = { ...view, ...(await more[what]()) };
  }

  #view(place: number): BucketView {
    return this.#views[place] as BucketView;
  }

  /**
   * `guarded`: every bucket is still at the version that it was read at, so what was read of its lines, holds and grants is
   * as it was too; and its window is not over.
   */
  async write(writes: QuotaWrites, guarded: boolean): Promise<boolean> {
    this.#look = true;
    const { update } = writes.buckets;
    const changed = update.toSorted(compareNamed);
    if (!guarded) await this.#rows.writeBuckets(this.#connection, changed);
    else {
      const kept = this.#views.filter(({ row }) => !update.some(({ id }) => id === row.id));
      for (const { row } of kept)
        if ((await this.#rows.bucket(this.#connection, row))?.version !== row.version) return false;
      for (const row of changed)
        if (!(await this.#rows.writeBucket(this.#connection, row, this.#asRead(row)))) return false;
    }
    await this.#rows.write(this.#connection, writes);
    return true;
  }

  #asRead(row: NamedBucket) {
    const place = this.names.indexOf(nameOf(row));
    const { rows } = this.#rows;
    const same = rows.is(quotaBuckets, "version", this.#view(place).row.version);
    const { rule } = this.#question.wanted[place] as Wanted;
    const ends = endOf(rule, this.#now);
    return ends === undefined ? same : sql`${same} AND ${rows.dialect.clock} < ${sql.raw(String(ends))}`;
  }
}
