// where require.js finds anywidget: beside the page, not on another host
require.config({paths: {anywidget: '_static/vendor/anywidget'}})
