export const hf: any = undefined; export type hf = any;
export const uploads: any = undefined; export type uploads = any;