/** Prisma's own way: `const prisma = new PrismaClient({ adapter }).$extends(holdfast())`. */
import { Holdfast, type HoldfastOptions, type TryLockResult } from "../../holdfast.ts";
import { NotInTransactionError } from "../../seam/errors.ts";
import type { Lockable } from "../../seam/key.ts";
import { checkCall, checkNames } from "../../input/options.ts";
import { type LockOptions, type Transaction, contextOf, scopeNamed } from "../../transaction/scope.ts";
import { optionNames } from "../../transaction/plan.ts";
import type { TransactionOptions } from "../../transaction/transaction.ts";
import { seeTransactions } from "./end.ts";
import {
  type Delegate,
  type FindArgs,
  type PrismaLock,
  type Schema,
  findManyLocked,
  findOneLocked,
} from "./find.ts";
import {
  type PrismaClientLike,
  type PrismaTransaction,
  type TransactionOf,
  databaseOf,
  isTransaction,
} from "./from.ts";
import { readsOf } from "./mysql.ts";
import { openerOf, openers } from "./openings.ts";
import type { PrismaArgs, PrismaFound, PrismaSelecting } from "./types.ts";
import {
  type PrismaDecided,
  type PrismaVersioned,
  type UpdateArgs,
  updateVersioned,
  type versionedNames,
} from "./update.ts";

type FindName = "findMany" | "findFirst" | "findUnique";

/** Nothing but what is known. */
type Only<Given, Known> = { readonly [K in Exclude<keyof Given, keyof NonNullable<Known>>]?: never };

type Part<A, Name extends string> = A extends { readonly [K in Name]?: infer Value } ? Value : never;

/** The arguments of Prisma's own, and more of ours; nothing else. */
type With<T, A, Name extends FindName, More, Names extends string> = A &
  PrismaArgs<T, Name> &
  More & {
    readonly [K in Exclude<keyof A, keyof PrismaArgs<T, Name> | Names>]?: never;
  } & {
    readonly [K in keyof A & ("select" | "include" | "omit")]?: Only<A[K], Part<PrismaArgs<T, Name>, K>>;
  };

type Locked<T, A, Name extends FindName> = With<T, A, Name, { readonly lock?: PrismaLock }, "lock">;

type Versioned<T, A, R> = With<T, A, "findUnique", PrismaVersioned<T, R>, (typeof versionedNames)[number]>;

/** What `prisma.$extends(holdfast())` adds. */
export interface PrismaExtension<Tx = PrismaTransaction> {
  readonly name: "holdfast";
  readonly client: {
    /** The instance, for all that takes one: `quota(prisma.$holdfast, { … })`. */
    readonly $holdfast: Holdfast<Tx>;
    /** Takes locks until the end of the transaction that this is the client of. */
    $lock(locks: Lockable | readonly Lockable[], options?: LockOptions): Promise<void>;
    /** The same, if they are free; false if they are not. */
    $tryLock(locks: Lockable | readonly Lockable[]): Promise<boolean>;
    /** Runs the body in a transaction if the locks are free, and says so if they are not. Waits for nobody. */
    $tryLock<T extends PrismaClientLike, R>(
      this: T,
      locks: Lockable | readonly Lockable[],
      body: (tx: TransactionOf<T>) => Promise<R>,
      options?: Omit<TransactionOptions, "lock" | "wait">,
    ): Promise<TryLockResult<R>>;
    /** Runs what is meant to be apart from the transaction whose body calls it; see `hf.outside`. */
    $outside<R>(work: () => R): R;
    /** `$transaction` with locks, deadline and retries: `prisma.$exact({ lock: key("upload", id) }, async (tx) => …)`. */
    $exact<T extends PrismaClientLike, R>(this: T, body: (tx: TransactionOf<T>) => Promise<R>): Promise<R>;
    $exact<T extends PrismaClientLike, R>(
      this: T,
      options: TransactionOptions,
      body: (tx: TransactionOf<T>) => Promise<R>,
    ): Promise<R>;
  };
  readonly model: {
    readonly $allModels: {
      /** As `findUnique`, with the row locked until the end of the transaction. */
      findUniqueForUpdate<T, A extends PrismaSelecting>(
        this: T,
        args: Locked<T, A, "findUnique">,
      ): Promise<PrismaFound<T, A> | null>;
      /** As `findFirst`, with the row locked until the end of the transaction. */
      findFirstForUpdate<T, A extends PrismaSelecting>(
        this: T,
        args?: Locked<T, A, "findFirst">,
      ): Promise<PrismaFound<T, A> | null>;
      /** As `findMany`, with the rows locked, in the order of their primary key, until the end of the transaction. */
      findManyForUpdate<T, A extends PrismaSelecting>(
        this: T,
        args?: Locked<T, A, "findMany">,
      ): Promise<PrismaFound<T, A>[]>;
      /**
       * As `update`, if nobody has written the row since it was read, by a field that counts up:
       * `updateVersioned({ where: { id, version }, data })` throws `StaleVersionError` else, and with a function,
       * `updateVersioned({ where: { id }, data: (row) => ({ … }) })`, the row is read and decided upon anew.
       */
      updateVersioned<T, A extends PrismaSelecting, const R extends PrismaDecided<T>>(
        this: T,
        args: Versioned<T, A, R>,
      ): Promise<PrismaFound<T, A>>;
    };
  };
}

/** Prisma's client as its extensions see it. */
type Extended = PrismaClientLike & Schema & { readonly _originalClient?: object };
type Model = Delegate & { readonly $parent: Extended };
type Body = (tx: unknown) => Promise<unknown>;

/** `Tx`: what `prisma.$holdfast` calls a transaction, where that matters: `holdfast<Prisma.TransactionClient>()`. */
export function holdfast<Tx = PrismaTransaction>(options: HoldfastOptions = {}): PrismaExtension<Tx> {
  // $extends calls it with the client, whose connections must be seen from the first one on.
  const extend = (client: PrismaClientLike & { $extends(extension: object): PrismaClientLike }) => {
    seeTransactions(client);
    let extended: PrismaClientLike = client;
    const database = databaseOf(client, () => openerOf(extended));
    const hf = new Holdfast({ ...database, takesPart: true }, options);
    extended = client.$extends({
      name: "holdfast",
      client: clientOf(hf),
      model: { $allModels: modelOf(hf) },
    });
    return extended;
  };
  return extend as unknown as PrismaExtension<Tx>;
}

/** Of transactions that are opened by other means than these, too. */
function scopeIn(hf: Holdfast<object>, tx: object, call: string) {
  if (!isTransaction(tx))
    throw new NotInTransactionError(
      "this is no transaction, and the lock would be gone at once. Use prisma.$exact(…) or prisma.$transaction(async (tx) => …), and the `tx` of it.",
      undefined,
      { call },
    );
  return scopeNamed(contextOf(hf, call), tx, call);
}

function clientOf(hf: Holdfast<object>) {
  const native =
    (body: Body) =>
    (tx: Transaction<unknown>): Promise<unknown> =>
      body(tx.client);
  // Called so, each adds no frame of its own between a transaction and the place where it was asked for.
  const [transact, tryToLock] = [hf.transaction.bind(hf), hf.tryLock.bind(hf)];
  return {
    $holdfast: hf,
    async $lock(this: Extended, locks: Lockable | readonly Lockable[], how?: LockOptions) {
      await scopeIn(hf, this, "$lock").lock(locks, how as never);
    },
    async $tryLock(
      this: Extended,
      locks: Lockable | readonly Lockable[],
      body?: Body,
      how?: Omit<TransactionOptions, "lock" | "wait">,
    ) {
      if (body === undefined) return scopeIn(hf, this, "$tryLock(locks)").tryLock(locks);
      if (!isTransaction(this)) return openers.run(this, tryToLock, locks, native(body), how);
      return scopeIn(hf, this, "$tryLock").transaction(async (tx) => {
        if (!(await tx.tryLock(locks))) return { acquired: false };
        return { acquired: true, value: await body(tx.client) };
      });
    },
    $outside(this: Extended, work: () => unknown) {
      return hf.outside(work);
    },
    async $exact(this: Extended, first: TransactionOptions | Body, second?: Body) {
      const [how, body] = checkCall<TransactionOptions, Body>("$exact", first, second);
      checkNames("$exact", how, optionNames);
      if (isTransaction(this)) return scopeIn(hf, this, "$exact").transaction(how, native(body));
      return openers.run(this, transact, how, native(body));
    },
  };
}

function modelOf(hf: Holdfast<object>) {
  const find = (delegate: Model, name: FindName, args?: FindArgs) => {
    const tx = delegate.$parent;
    const scope = scopeIn(hf, tx, `${delegate.$name}.${name}ForUpdate`);
    const place = { scope, schema: tx, delegate, ...readsOf(tx) };
    return name === "findMany" ? findManyLocked(place, args) : findOneLocked(place, name, args);
  };
  const update = (delegate: Model, args: UpdateArgs) => {
    const { $name: name, $parent: parent } = delegate;
    const context = contextOf(hf, `${name}.updateVersioned`);
    // In the transaction whose body calls, as everything of this instance is.
    const around = context.current.getStore();
    const tx = isTransaction(parent) ? parent : around?.open ? (around.client as object) : undefined;
    const here = tx ? delegateOf(tx, name) : delegate;
    const within = <R>(body: (on: Delegate) => Promise<R>): Promise<R> =>
      tx
        ? body(here)
        : openers.run(parent, () => hf.transaction((own) => body(delegateOf(own.client, name))));
    const snapshot = tx !== undefined && readsOf(tx).snapshot;
    return updateVersioned({ context, schema: parent, delegate: here, tx, snapshot, within }, args);
  };
  return {
    async findUniqueForUpdate(this: Model, args: FindArgs) {
      return find(this, "findUnique", args);
    },
    async findFirstForUpdate(this: Model, args?: FindArgs) {
      return find(this, "findFirst", args);
    },
    async findManyForUpdate(this: Model, args?: FindArgs) {
      return find(this, "findMany", args);
    },
    async updateVersioned(this: Model, args: UpdateArgs) {
      return update(this, args);
    },
  };
}

function delegateOf(client: object, model: string): Delegate {
  return (client as Record<string, Delegate>)[model] as Delegate;
}
