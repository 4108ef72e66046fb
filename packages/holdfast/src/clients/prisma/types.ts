/** What Prisma's operations take and bring, told from the types that a model's delegate carries. */

/** Of a delegate: under a symbol, the types of its model. */
interface Carrier<Types> {
  [name: symbol]: { types: Types };
}

export type PrismaArgs<T, Name extends string> =
  T extends Carrier<{ operations: { [K in Name]: { args: infer Args } } }> ? Args : never;

type PayloadOf<T> = T extends Carrier<{ payload: infer Payload }> ? Payload : never;

/** A model's own columns, its composites, and its relations. */
interface Payload {
  readonly scalars: object;
  readonly objects: object;
  readonly composites: object;
}

/** Fields that are asked for: not those set to false or undefined. */
type Asked<S> = { [K in keyof S as S[K] extends false | null | undefined ? never : K]: S[K] };

type Whole<P, A> = P extends { scalars: infer S; composites: infer C }
  ? A extends { omit: infer O }
    ? Omit<S & C, keyof Asked<O>>
    : S & C
  : never;

type Counted<P, A> = {
  [
    K in A extends { select: infer S } ? keyof Asked<S> : P extends { objects: infer O } ? keyof O : never
  ]: number;
};

type Field<P, K, A> = P extends { objects: { [F in K & string]: infer Related } }
  ? One<Related, A>
  : P extends { scalars: { [F in K & string]: infer Value } }
    ? Value
    : P extends { composites: { [F in K & string]: infer Value } }
      ? One<Value, A>
      : K extends "_count"
        ? Counted<P, A>
        : never;

/** Distributes over `Related | null`. */
type One<Related, A> = Related extends (infer Each)[]
  ? Found<Each, A>[]
  : Related extends null
    ? null
    : Found<Related, A>;

type Found<P, A> = A extends { select: infer S extends object }
  ? { [K in keyof Asked<S>]: Field<P, K, S[K & keyof S]> }
  : A extends { include: infer I extends object }
    ? Whole<P, A> & { [K in keyof Asked<I>]: Field<P, K, I[K & keyof I]> }
    : Whole<P, A>;

/**
 * What Prisma's arguments look like whatever the model: `true` in a selection stays `true` while they are inferred, which
 * the model's own, not known yet at that point, could not see to.
 */
export interface PrismaSelecting {
  readonly select?: Selection | null;
  readonly include?: Selection | null;
  readonly omit?: Readonly<Record<string, boolean | undefined>> | null;
}

interface Selection {
  readonly [field: string]: boolean | PrismaSelecting | undefined;
}

/** What a delegate of type `T` finds with arguments of type `A`. */
export type PrismaFound<T, A> = PayloadOf<T> extends Payload ? Found<PayloadOf<T>, A> : never;

/** All columns of it. */
export type PrismaWhole<T> = PayloadOf<T> extends { scalars: infer S } ? S : never;
