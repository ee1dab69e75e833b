// The usual names of modules come from the folder that they are built in: numbered in order, they are the same everywhere.
module.exports = { optimization: { moduleIds: 'natural', chunkIds: 'natural' } };
